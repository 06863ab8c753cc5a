"""`kvferry bench serve`: a trace against a live cluster, and what became of every request."""
