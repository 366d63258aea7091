"""How `ask` is carried out: in this process (`simulator`), or by sites on their own machines (`remote`)."""
