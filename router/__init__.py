"""Sends each prompt to the replicas that serve it best, and stands between them and the clients."""
