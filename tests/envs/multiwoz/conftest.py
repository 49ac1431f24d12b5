"""The worlds of these tests: the published files where they are, the generated town, and two made-up
hotels."""

import os
from pathlib import Path

import pytest

from envs.multiwoz.database import Database
from envs.multiwoz.world import load_world

DATA = Path(os.environ.get("RL_DIALOG_DATA", Path(__file__).parents[3] / "../shared/data")) / "multiwoz"


@pytest.fixture(scope="session")
def multiwoz():
    """The world of the published files; skips where they are absent."""
    if not DATA.is_dir():
        pytest.skip(f"{DATA} is absent; set RL_DIALOG_DATA to a folder with the public corpora")
    return load_world(DATA)


@pytest.fixture(scope="session")
def town():
    return load_world()


@pytest.fixture(params=["made up", pytest.param("published", marks=pytest.mark.realdata)])
def hotels(request):
    """A database whose hotel 0 is in the east with 4 stars and internet, and whose hotel 1 is in the north
    with 4 stars."""
    if request.param == "published":
        return request.getfixturevalue("multiwoz").database
    contact = {"internet": "yes", "pricerange": "cheap", "type": "hotel", "parking": "no"}
    rows = [
        {
            "name": "one",
            "area": "east",
            "stars": "4",
            "phone": "01223111111",
            "postcode": "cb11aa",
            **contact,
        },
        {
            "name": "two",
            "area": "north",
            "stars": "4",
            "phone": "01223222222",
            "postcode": "cb22bb",
            **contact,
        },
        {
            "name": "three",
            "area": "east",
            "stars": "2",
            "phone": "01223333333",
            "postcode": "cb33cc",
            **contact,
        },
    ]
    return Database({"hotel": rows}, taxi_types=["saloon"])
