"""What a process may listen on: addresses are HOST:PORT wherever they are built, told and split."""


def checked_host(host: str) -> str:
    """Raises ValueError for an IPv6 address, whose colons HOST:PORT has no place for."""
    if ":" in host:
        raise ValueError(f"{host!r} is an IPv6 address: give an IPv4 address or a name instead")
    return host
