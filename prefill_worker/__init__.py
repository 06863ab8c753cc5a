"""A prompt comes in; its KV blocks and first tokens go out."""
