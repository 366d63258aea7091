"""What was run, for people: notes, figures, tables and pages."""
