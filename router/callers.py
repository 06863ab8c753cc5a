"""Who is calling: from the key a door was shown, never from what a request says of itself."""

import hmac
from collections.abc import Mapping

from kvcache.block_hash import PUBLIC, tenant_key
from router.errors import Unauthenticated
from router.request import Tenant

EVERYONE = Tenant("public", PUBLIC)
BEARER = "bearer "


class Callers:
    """`api_keys` maps each key to the identity it stands for; without any, everyone is one."""

    def __init__(self, api_keys: Mapping[str, str]) -> None:
        self._tenants = [
            (key.encode(), Tenant(identity, tenant_key(identity)))
            for key, identity in api_keys.items()
        ]

    def tenant(self, authorization: str | None) -> Tenant:
        """Raises Unauthenticated. Takes as long for a key that is nearly right as for any other."""
        if not self._tenants:
            return EVERYONE
        if not authorization or not authorization.lower().startswith(BEARER):
            raise Unauthenticated("an API key is needed: send 'Authorization: Bearer KEY'")
        given = authorization[len(BEARER) :].strip().encode("utf-8", "surrogateescape")
        found: Tenant | None = None
        for key, tenant in self._tenants:
            if hmac.compare_digest(key, given):
                found = tenant
        if found is None:
            raise Unauthenticated("the API key is not known here")
        return found
