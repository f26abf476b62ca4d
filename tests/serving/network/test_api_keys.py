"""The file of API keys, and the check of a call's key."""

import pytest

from gimbal_jax.exceptions import Unauthenticated
from gimbal_jax.serving.network.api_keys import GATEWAY, authenticate, load_keys, new_key
from tests.serving.rpc.test_interceptors import EXPIRY, KEY, KEY_FILE, OLD_KEY, OTHER_KEY


def write(tmp_path, text):
    path = tmp_path / "keys"
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_key_file_gives_names_and_expiry_without_the_keys(tmp_path):
    alice, bob, nameless = load_keys(write(tmp_path, KEY_FILE))
    assert (alice, bob) == (new_key(KEY, "alice"), new_key(OLD_KEY, "bob", EXPIRY))
    assert nameless.name.startswith("key-")
    assert not any(key in repr((alice, bob, nameless)) for key in (KEY, OLD_KEY, OTHER_KEY))


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("", "contains no key"),
        ("# nothing\n", "contains no key"),
        ("short alice", "line 1: a key is at least 16"),
        ("ümlaut-key-0123456789", "plain ASCII"),
        ("key,with,commas,0123456789", "line 1: a key is at least 16 letters, digits"),
        (f"{KEY} alice\n{KEY} bob", "line 2: the key is in the file twice"),
        (f"{KEY} alice 2027-01-31T00:00:00", "with a zone"),
        (f"{KEY} alice tomorrow", "ISO date-time with a zone.*tomorrow"),
        (f"{KEY} 2027-01-31T00:00:00Z", "is in the place of the name"),
        (f"{KEY} alice 2027-01-31T00:00:00Z more", "has 4 words"),
        (f"{KEY} {GATEWAY}", "reserved for the HTTP gateway"),
    ],
)
def test_bad_key_file_error_names_the_line_but_no_key(tmp_path, text, complaint):
    with pytest.raises(ValueError, match=complaint) as rejected:
        load_keys(write(tmp_path, text))
    assert KEY not in str(rejected.value)


def test_missing_key_file_is_rejected(tmp_path):
    with pytest.raises(ValueError, match=r"api_keys .*nothing: No such file"):
        load_keys(tmp_path / "nothing")


def test_key_expires_at_its_time():
    keys = [new_key(OLD_KEY, "bob", EXPIRY)]
    assert authenticate(f"Bearer {OLD_KEY}", keys, EXPIRY - 0.001).name == "bob"
    assert authenticate(f"bearer  {OLD_KEY}", keys, EXPIRY - 0.001).name == "bob"
    with pytest.raises(Unauthenticated, match=r"'bob' has expired \(2027-01-31T00:00:00\+00:00\)"):
        authenticate(f"Bearer {OLD_KEY}", keys, EXPIRY)
