"""Hides what must not be shown: which names are those of secrets, and which parts of a value."""

from __future__ import annotations

import re

HIDDEN = "(hidden)"
"""Stands where a value would."""

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_ANYWHERE = re.compile(r"SECRET|PASSW|PASSPHRASE|CREDENTIAL")
_AT_THE_END = re.compile(r"(TOKEN|KEY|PWD)S?$")
_WHOLE = frozenset(
    [
        *("AUTH", "BEARER", "COOKIE", "COOKIES", "CRED", "CREDS", "DSN", "HTPASSWD", "JWT"),
        *("NETRC", "OAUTH", "PASSCODE", "PAT", "PRIVATE", "SAS", "SESSION", "WEBHOOK"),
    ]
)
_PAIRS = re.compile(r"\b(CONNECTION|CONN) (STRING|STR)\b|\bCONNSTR\b|\bCONNECTIONSTRING\b")
# Words that end like one of the above and are none.
_PLAIN = frozenset(["BYPASS", "COMPASS", "HOTKEY", "MONKEY", "OLDPWD", "TURKEY"])
# The working directory, and where to reach an agent that keeps keys.
_PLAIN_NAMES = frozenset(["PWD", "SSH_AUTH_SOCK"])

# Up to the last @ before the path: a password may hold one itself.
# An address that was taken for a path has lost a slash.
_USER_IN_ADDRESS = re.compile(r"(?<=[a-z0-9]:/)(/?)[^/?#\s]+@", re.IGNORECASE)
_ASSIGNED = re.compile(r"""(?<![\w.-])([A-Za-z][\w.-]*)(\s*=\s*)("[^"]*"|'[^']*'|[^\s&;,#"']+)""")
_SIGNATURES = frozenset(["sig", "signature", "sharedaccesssignature"])
_HEADER = re.compile(r"\b(bearer|basic)(\s+)[A-Za-z0-9+/=._~-]{8,}", re.IGNORECASE)
_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|gh[oprsu]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|xox[abeprs]-[\w-]{10,}|sk-[\w-]{20,}|A[KS]IA[0-9A-Z]{16}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*"
)


def is_secret(name: str) -> bool:
    """Whether a variable's name says that its value is a secret.

    The words of a name count: ``GITHUB_PAT`` is one, ``PATH`` and ``PATTERN`` are not.
    """
    if name in _PLAIN_NAMES:
        return False
    words = [word.upper() for word in _WORD.findall(name)]
    names_one = any(
        word in _WHOLE
        or _ANYWHERE.search(word)
        or (_AT_THE_END.search(word) and word not in _PLAIN)
        for word in words
    )
    # Before other words, "pass" is what is done to them.
    ends_with_one = words[-1:] != [] and words[-1].endswith("PASS") and words[-1] not in _PLAIN
    return names_one or ends_with_one or bool(_PAIRS.search(" ".join(words)))


def without_secrets(text: str) -> str:
    """A value with what is secret in it hidden: `HIDDEN` stands there.

    Hidden are user and password of an address, what is assigned to a name of a secret (in an
    address's query, in a connection string), and keys and tokens of well-known forms.
    """
    text = without_users(text)
    text = _ASSIGNED.sub(_hide_assigned, text)
    text = _HEADER.sub(rf"\1\2{HIDDEN}", text)
    return _SHAPES.sub(HIDDEN, text)


def without_users(text: str) -> str:
    """A text with user and password of each address in it hidden."""
    return _USER_IN_ADDRESS.sub(rf"\1{HIDDEN}@", text)


def holds_secret(text: str) -> bool:
    """Whether a value shows by itself that it holds a secret, whatever its name."""
    return without_secrets(text) != text


def _hide_assigned(found: re.Match[str]) -> str:
    name, equals, value = found.groups()
    if value == HIDDEN or not (is_secret(name) or name.lower() in _SIGNATURES):
        return found.group()
    return f"{name}{equals}{HIDDEN}"
