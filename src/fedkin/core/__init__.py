"""The server's view of the clients, and the clients' view of their rows: what methods are written against."""
