"""What the ledgers of all processes prove when they are read together."""
