"""Names of secrets, and values that carry one whatever their name."""

from __future__ import annotations

import pytest

from anygauge.util.errors import DataError
from anygauge.util.hiding import HIDDEN, holds_secret, is_secret, without_secrets

KNOWN = [
    *("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"),
    *("AWS_SESSION_TOKEN", "MLFLOW_TRACKING_PASSWORD", "OPENAI_APIKEY", "VAULT_TOKEN_ID"),
    *("TOKENS3", "GITHUB_PAT", "MYSQL_PWD", "DB_PASSWD", "AZURE_STORAGE_CONNECTION_STRING"),
    *("GOOGLE_CREDENTIALS", "SSH_PASSPHRASE", "SAS", "NETRC_AUTH", "MY_CREDS", "KEYFILE_PASS"),
    *("PGPASSWORD", "SSHPASS", "api_key", "accountKey", "SENTRY_DSN", "JWT", "X_AUTH"),
    *("CONN_STR", "MY_PRIVATE", "STEAM_COOKIE", "SLACK_WEBHOOK", "CONNECTION_STRING"),
]
ADDRESSES = {
    "HTTPS_PROXY": "http://ann:hush@proxy.example:3128",
    "DATABASE_URL": "postgresql://ann:hush@db.example:5432/runs",
}


@pytest.mark.parametrize("name", [*KNOWN, *ADDRESSES])
def test_secrets_are_recognized_by_name_or_value(name: str) -> None:
    assert is_secret(name) or holds_secret(ADDRESSES[name])


@pytest.mark.parametrize(
    "name",
    [
        *("PATH", "LD_LIBRARY_PATH", "PATTERN", "KEYBOARD", "TOKENIZERS_PARALLELISM", "AUTHOR"),
        *("GIT_AUTHOR_NAME", "OMP_NUM_THREADS", "BYPASS_CHECKS", "PASSENGER", "MONKEY", "PWD"),
        *("OLDPWD", "CREDIT", "SASL_MECHANISM", "XAUTHORITY", "SESSIONS_DIR", "COMPASS", "PATCH"),
        *("HF_HOME", "pass_environment", "CUDA_VISIBLE_DEVICES", "MASTER_ADDR"),
        *("SSH_AUTH_SOCK", "DATABASE_URL"),
    ],
)
def test_names_that_are_none(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("http://ann:hush@host:1/a?b=c", f"http://{HIDDEN}@host:1/a?b=c"),
        ("https://hush@host/ann@example", f"https://{HIDDEN}@host/ann@example"),
        ("redis://:hu@sh@host", f"redis://{HIDDEN}@host"),
        ("https://a.blob/c?sv=1&sig=hu%2Fsh&se=2", f"https://a.blob/c?sv=1&sig={HIDDEN}&se=2"),
        ("https://a/c?access_token=hush#top", f"https://a/c?access_token={HIDDEN}#top"),
        ("AccountName=me;AccountKey=hush==;A=1", f"AccountName=me;AccountKey={HIDDEN};A=1"),
        ("Endpoint=sb://x;SharedAccessKey=hush", f"Endpoint=sb://x;SharedAccessKey={HIDDEN}"),
        ("SharedAccessSignature=hush", f"SharedAccessSignature={HIDDEN}"),
        ("Server=x;Uid=me;Pwd=hush;", f"Server=x;Uid=me;Pwd={HIDDEN};"),
        ("host=x password='hu sh' dbname=y", f"host=x password={HIDDEN} dbname=y"),
        ("Authorization: Bearer hushhushhush", f"Authorization: Bearer {HIDDEN}"),
        ("use hf_" + "h" * 34 + " here", f"use {HIDDEN} here"),
        ("-----BEGIN RSA PRIVATE KEY-----\nhush", HIDDEN),
    ],
)
def test_what_is_secret_in_a_value_is_hidden(value: str, shown: str) -> None:
    assert without_secrets(value) == shown and holds_secret(value)
    assert without_secrets(shown) == shown


@pytest.mark.parametrize(
    "value",
    [
        *("", "1", "/usr/bin:/bin", "http://host:3128", "hf://user/repo@main/file", "a=b,c=d"),
        *("git@example.org:a/b", "max_split_size_mb:128", "expandable_segments:True", "s3://b/k"),
    ],
)
def test_other_values_are_as_they_were(value: str) -> None:
    assert without_secrets(value) == value and not holds_secret(value)


def test_no_error_quotes_the_password_of_an_address() -> None:
    error = DataError(f"{ADDRESSES['HTTPS_PROXY']}/rows.jsonl: no such file")
    assert str(error) == f"http://{HIDDEN}@proxy.example:3128/rows.jsonl: no such file"
