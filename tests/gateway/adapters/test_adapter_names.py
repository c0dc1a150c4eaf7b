"""Names of adapters: none means another adapter once a client or a proxy has normalised the URL that it stands in."""

from urllib.parse import urljoin

import pytest

from gateway.adapters.record import check_name
from gateway.core.errors import ApiError

URL = "http://here/admin/v1/adapters/"


@pytest.mark.parametrize("name", ["a", "org/name", "a.b-c_d", "v1..2", "a/b/c", "x" * 128])
def test_names_that_stay_as_they_are_in_a_url(name):
    check_name(name, "lora_name")
    assert urljoin(URL, name) == URL + name


@pytest.mark.parametrize(
    "name", ["", "a/../b", "a/./b", "..", ".", "t/", "/t", "a//b", "a/.b", "-a", "a:b", "a b", "x" * 129, "a\n", "ä"]
)
def test_other_names_are_refused(name):
    with pytest.raises(ApiError, match="lora_name must be 1 to 128 letters"):
        check_name(name, "lora_name")
