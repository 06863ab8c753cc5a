"""How large an index may grow, and how fast a router decides over it."""
