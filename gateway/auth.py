"""API keys: where they come from, and a comparison that does not tell how near a guess was."""

import hashlib
import hmac
import os
from collections.abc import Iterable
from pathlib import Path

from cascade.errors import ConfigError
from gateway.config import Config


class KeyRing:
    """The accepted keys, as hashes of one length. Empty: every request passes."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = [_digest(key) for key in keys]

    @property
    def required(self) -> bool:
        """Whether requests must carry a key."""
        return bool(self._digests)

    def accepts(self, key: str) -> bool:
        """Compare with every key, always all of them, each in constant time."""
        digest = _digest(key)
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(digest, known)
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def bearer_token(header: str | None) -> str | None:
    """The token of an `Authorization` header, or None when it is not a Bearer one."""
    scheme, _, token = (header or "").partition(" ")
    token = token.strip()
    return token if scheme.lower() == "bearer" and token else None


def load_keys(config: Config) -> KeyRing:
    """Keys of the environment variable and of the file that the configuration names.

    Raises ConfigError when a source is named and gives no key: an empty source must not open the door.
    """
    keys: list[str] = []
    server = config.server
    if server.api_keys_env is not None:
        found = [key.strip() for key in os.environ.get(server.api_keys_env, "").split(",") if key.strip()]
        if not found:
            raise ConfigError(f"server.api_keys_env: environment variable {server.api_keys_env} holds no key")
        keys += found
    if server.api_keys_file is not None:
        path = (config.base_dir / Path(server.api_keys_file).expanduser()).resolve()
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"server.api_keys_file: {path} cannot be read: {error}") from error
        found = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not found:
            raise ConfigError(f"server.api_keys_file: {path} holds no key")
        keys += found
    return KeyRing(keys)
