"""What every worker is: one engine over its ranks, a lease in the index, a door for the router."""
