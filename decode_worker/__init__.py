"""KV blocks come in, or a prompt; tokens go out."""
