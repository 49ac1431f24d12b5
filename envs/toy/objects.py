"""What the oracles know: 40 things with 14 properties, 65 cities with 5."""

from __future__ import annotations

OBJECT_QUESTIONS = {
    "animal": "Is it an animal?",
    "eat": "Can one eat it?",
    "fly": "Does it fly?",
    "water": "Is it found in water?",
    "fur": "Does it have fur?",
    "legs": "Does it stand on legs?",
    "bigger": "Is it bigger than a person?",
    "sweet": "Is it sweet?",
    "wheels": "Does it have wheels?",
    "metal": "Is it made of metal?",
    "wear": "Does one wear it?",
    "music": "Does one make music with it?",
    "electric": "Is it electric?",
    "round": "Is it round?",
}
_PROPERTIES = {
    "dog": "animal fur legs",
    "horse": "animal fur legs bigger",
    "bat": "animal fur fly",
    "otter": "animal fur legs water",
    "whale": "animal water bigger",
    "trout": "animal water eat",
    "frog": "animal water legs",
    "eagle": "animal fly legs",
    "duck": "animal fly legs water",
    "ostrich": "animal legs bigger",
    "snake": "animal",
    "bee": "animal fly",
    "apple": "eat sweet round",
    "banana": "eat sweet",
    "carrot": "eat",
    "pea": "eat round",
    "car": "wheels metal bigger",
    "tram": "wheels metal bigger electric",
    "bicycle": "wheels metal",
    "cart": "wheels bigger",
    "skateboard": "wheels",
    "plane": "fly metal bigger wheels",
    "drone": "fly electric",
    "kite": "fly",
    "ship": "water metal bigger",
    "raft": "water bigger",
    "anchor": "water metal",
    "hammer": "metal",
    "coin": "metal round",
    "kettle": "metal electric",
    "ring": "wear metal round",
    "glove": "wear",
    "helmet": "wear round",
    "piano": "music legs bigger",
    "guitar": "music",
    "flute": "music metal",
    "drum": "music round",
    "ball": "round",
    "table": "legs",
    "lamp": "electric",
}
OBJECTS = {
    name: {question: "Yes." if question in held.split() else "No." for question in OBJECT_QUESTIONS}
    for name, held in _PROPERTIES.items()
}

CITY_QUESTIONS = {
    "continent": "Which continent is it on?",
    "language": "Which language do most people speak there?",
    "sea": "Is it by the sea?",
    "capital": "Is it the capital of its country?",
    "equator": "Is it north or south of the equator?",
}
# Continent, language: cities; * by the sea, ! a capital, - south of the equator.
_CITIES = """
Europe, French: paris!, lyon, marseille*
Europe, English: london!, manchester, dublin*!
Europe, Spanish: madrid!, seville, malaga*
Europe, Portuguese: lisbon*!, porto*
Europe, German: berlin!, munich, vienna!, zurich
Europe, Italian: rome!, milan, turin, naples*, genoa*
Europe, Swedish: stockholm*!, gothenburg*
Europe, Polish: warsaw!, krakow, gdansk*
North America, English: new york*, boston*, chicago, denver
North America, French: montreal, quebec
North America, Spanish: mexico city!, guadalajara, havana*!
South America, Spanish: lima*!-, bogota!, medellin, santiago!-, montevideo*!-
South America, Portuguese: rio de janeiro*-, sao paulo-, brasilia!-
Africa, Arabic: cairo!, alexandria*, algiers*!, marrakesh, casablanca*
Africa, Portuguese: luanda*!-, maputo*!-
Asia, Japanese: tokyo*!, osaka*, kyoto
Asia, Chinese: beijing!, shanghai*, wuhan
Asia, Korean: seoul!, busan*
Asia, Arabic: riyadh!, jeddah*, doha*!
Oceania, English: sydney*-, melbourne*-, canberra!-, wellington*!-, auckland*-
"""


def _read_cities() -> dict[str, dict[str, str]]:
    cities = {}
    for line in _CITIES.strip().splitlines():
        where, names = line.split(": ")
        continent, language = where.split(", ")
        for name in names.split(", "):
            cities[name.rstrip("*!-")] = {
                "continent": f"{continent}.",
                "language": f"{language}.",
                "sea": "Yes." if "*" in name else "No.",
                "capital": "Yes." if "!" in name else "No.",
                "equator": "South." if name.endswith("-") else "North.",
            }
    return cities


CITIES = _read_cities()
