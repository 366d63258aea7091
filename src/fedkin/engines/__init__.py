"""How `ask` is carried out: in this process (`local`)."""
