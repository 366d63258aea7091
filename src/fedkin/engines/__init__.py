"""How `ask` is carried out: in this process (`local`), or by sites on their own machines (`flower`)."""
