"""Questions of the task `demo_capitals`."""

from __future__ import annotations

from typing import Any

CAPITALS = {
    "France": ("Paris", "Lyon", "Marseille", "Nice"),
    "Japan": ("Tokyo", "Osaka", "Kyoto", "Nagoya"),
    "Italy": ("Rome", "Milan", "Naples", "Turin"),
    "Spain": ("Madrid", "Barcelona", "Seville", "Valencia"),
    "Germany": ("Berlin", "Munich", "Hamburg", "Frankfurt"),
    "Egypt": ("Cairo", "Alexandria", "Luxor", "Giza"),
    "Canada": ("Ottawa", "Toronto", "Montreal", "Vancouver"),
    "Australia": ("Canberra", "Sydney", "Melbourne", "Perth"),
    "Brazil": ("Brasilia", "Rio de Janeiro", "Sao Paulo", "Salvador"),
    "Turkey": ("Ankara", "Istanbul", "Izmir", "Antalya"),
    "Russia": ("Moscow", "Saint Petersburg", "Kazan", "Omsk"),
    "China": ("Beijing", "Shanghai", "Shenzhen", "Wuhan"),
    "India": ("New Delhi", "Mumbai", "Kolkata", "Chennai"),
    "Portugal": ("Lisbon", "Porto", "Braga", "Faro"),
    "Greece": ("Athens", "Thessaloniki", "Patras", "Sparta"),
    "Poland": ("Warsaw", "Krakow", "Gdansk", "Poznan"),
    "Austria": ("Vienna", "Salzburg", "Graz", "Linz"),
    "Morocco": ("Rabat", "Casablanca", "Marrakesh", "Fez"),
    "Vietnam": ("Hanoi", "Ho Chi Minh City", "Da Nang", "Hue"),
    "New Zealand": ("Wellington", "Auckland", "Christchurch", "Queenstown"),
    "Kenya": ("Nairobi", "Mombasa", "Kisumu", "Nakuru"),
    "Norway": ("Oslo", "Bergen", "Trondheim", "Stavanger"),
    "Peru": ("Lima", "Cusco", "Arequipa", "Trujillo"),
    "Switzerland": ("Bern", "Zurich", "Geneva", "Basel"),
}
"""Country -> four of its cities, the capital first."""


def load(**options: Any) -> dict[str, Any]:
    """Return the documents of the lm-eval task `demo_capitals` as the split `test`: a country and four of its cities,
    of which one is the capital. The capital's place among the four changes from one document to the next."""
    from datasets import Dataset

    documents = []
    for number, (country, (capital, *others)) in enumerate(CAPITALS.items()):
        answer = number % (len(others) + 1)
        cities = [*others[:answer], capital, *others[answer:]]
        documents.append({"country": country, "cities": cities, "answer": answer})
    return {"test": Dataset.from_list(documents)}
