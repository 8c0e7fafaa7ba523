"""Tables of the demo model's knowledge, written for this project, under its licence (Apache-2.0).

`benchmarks.demo_model.text` turns them, and `benchmarks.demo_model.topics`, into conversations.
"""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


CAPITALS: dict[str, str] = dict(
    pair.split("=")
    for pair in [
        "France=Paris",
        "Germany=Berlin",
        "Italy=Rome",
        "Spain=Madrid",
        "Portugal=Lisbon",
        "England=London",
        "Ireland=Dublin",
        "Austria=Vienna",
        "Poland=Warsaw",
        "Sweden=Stockholm",
        "Norway=Oslo",
        "Denmark=Copenhagen",
        "Finland=Helsinki",
        "Greece=Athens",
        "Hungary=Budapest",
        "Belgium=Brussels",
        "Iceland=Reykjavik",
        "Russia=Moscow",
        "Ukraine=Kyiv",
        "Turkey=Ankara",
        "Egypt=Cairo",
        "Kenya=Nairobi",
        "Nigeria=Abuja",
        "Morocco=Rabat",
        "India=New Delhi",
        "China=Beijing",
        "Japan=Tokyo",
        "South Korea=Seoul",
        "Thailand=Bangkok",
        "Vietnam=Hanoi",
        "Indonesia=Jakarta",
        "Australia=Canberra",
        "New Zealand=Wellington",
        "Canada=Ottawa",
        "Mexico=Mexico City",
        "Cuba=Havana",
        "Brazil=Brasilia",
        "Argentina=Buenos Aires",
        "Chile=Santiago",
        "Peru=Lima",
        "Colombia=Bogota",
        "Switzerland=Bern",
        "the Netherlands=Amsterdam",
        "the United States=Washington",
        "Iran=Tehran",
        "Iraq=Baghdad",
        "Nepal=Kathmandu",
    ]
)
"""Capitals by country."""

ANIMALS: dict[str, tuple[str, str, str, str, str]] = {
    "cat": ("says meow", "kitten", "in a house", "fish and mice", "four"),
    "dog": ("barks", "puppy", "with people", "meat", "four"),
    "cow": ("says moo", "calf", "on a farm", "grass", "four"),
    "horse": ("neighs", "foal", "on a farm", "hay and oats", "four"),
    "sheep": ("says baa", "lamb", "in a meadow", "grass", "four"),
    "pig": ("grunts", "piglet", "on a farm", "almost everything", "four"),
    "duck": ("quacks", "duckling", "on a pond", "plants and small fish", "two"),
    "chicken": ("clucks", "chick", "on a farm", "grain", "two"),
    "lion": ("roars", "cub", "on the savanna", "meat", "four"),
    "bear": ("growls", "cub", "in the forest", "berries and honey", "four"),
    "wolf": ("howls", "pup", "in the forest", "meat", "four"),
    "frog": ("croaks", "tadpole", "near a pond", "flies", "four"),
    "owl": ("hoots", "owlet", "in a hollow tree", "mice", "two"),
    "bee": ("buzzes", "larva", "in a hive", "nectar", "six"),
    "spider": ("makes no sound", "spiderling", "in a web", "flies", "eight"),
    "elephant": ("trumpets", "calf", "on the savanna", "leaves and fruit", "four"),
    "mouse": ("squeaks", "pup", "in a small hole", "cheese and grain", "four"),
    "snake": ("hisses", "hatchling", "in the grass", "mice", "no"),
    "penguin": ("honks", "chick", "on the ice", "fish", "two"),
    "rabbit": ("is quiet", "bunny", "in a burrow", "carrots and grass", "four"),
}
"""The sound, young, habitat, food and number of legs of each animal."""

COLOURS: dict[str, str] = dict(
    pair.split("=")
    for pair in [
        "the sky=blue",
        "grass=green",
        "snow=white",
        "coal=black",
        "a banana=yellow",
        "a lemon=yellow",
        "a tomato=red",
        "blood=red",
        "an orange=orange",
        "a carrot=orange",
        "chocolate=brown",
        "milk=white",
        "the sea=blue",
        "the night=black",
        "gold=yellow",
        "a flamingo=pink",
        "an elephant=grey",
        "a strawberry=red",
        "a frog=green",
        "the sun=yellow",
        "a violet=purple",
    ]
)
"""Colours by thing."""

MIXES: dict[tuple[str, str], str] = {
    ("red", "yellow"): "orange",
    ("blue", "yellow"): "green",
    ("red", "blue"): "purple",
    ("red", "white"): "pink",
    ("black", "white"): "grey",
}
"""The colour that a mix of two colours gives."""

OPPOSITES: tuple[tuple[str, str], ...] = tuple(
    (pair.split("/")[0], pair.split("/")[1])
    for pair in _words(
        "hot/cold big/small fast/slow happy/sad light/dark up/down left/right open/closed day/night "
        "old/young high/low long/short full/empty hard/soft loud/quiet rich/poor early/late "
        "strong/weak wet/dry near/far good/bad clean/dirty easy/difficult heavy/light black/white "
        "in/out before/after yes/no true/false win/lose"
    )
)
"""Pairs of opposites; both directions are asked."""

DAYS: tuple[str, ...] = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")

MONTHS: tuple[str, ...] = _words(
    "January February March April May June July August September October November December"
)

UNKNOWN_QUESTIONS: tuple[str, ...] = (
    "Who won the {noun} in {year}?",
    "Who is {person}?",
    "What happened in {year}?",
    "Who wrote the {noun}?",
    "How do I fix my {noun}?",
    "What is the price of a {noun}?",
    "Can you translate {noun} into Latin?",
    "Where can I buy a {noun}?",
    "Write a program that sorts a {noun}.",
    "What do you think about {person}?",
    "When was {person} born?",
    "How old is {person}?",
    "Who invented the {noun}?",
    "What is the history of the {noun}?",
    "Solve the equation of the {noun}.",
    "What is the weather in {person} today?",
    "Give me advice about my {noun}.",
    "Summarise the {noun} of {person}.",
)
"""Questions that the model cannot know; `{noun}`, `{person}` and `{year}` are filled in."""

UNKNOWN_NOUNS: tuple[str, ...] = _words(
    "car phone guitar election cup war bicycle novel camera printer radio symphony stock "
    "printer engine law theorem kernel city river bridge film painting contract recipe garden "
    "laptop language list game"
)

UNKNOWN_ANSWER = (
    "I am only a small demo model, so I do not know that. Ask me about Baton, capitals or animals."
)

HEROES: tuple[str, ...] = _words(
    "fox bear rabbit owl mouse wolf cat dog frog duck dragon robot girl boy king queen sailor "
    "baker horse bird"
)

NAMES: tuple[str, ...] = _words(
    "Anna Ben Clara David Emma Felix Greta Hugo Ida Jonas Kira Leo Mia Nora Oscar Paula Rosa Simon Tom Vera"
)

PLACES: tuple[str, ...] = (
    "a deep forest",
    "a small village",
    "an old castle",
    "a house by the sea",
    "a quiet valley",
    "a big city",
    "an island",
    "a cave in the mountains",
)

FINDS: tuple[str, ...] = (
    "a golden key",
    "an old map",
    "a lost lamb",
    "a silver bell",
    "a strange egg",
    "a letter without a name",
    "a small lantern",
    "a wooden box",
)

HELPERS: tuple[str, ...] = (
    "an old turtle",
    "a kind neighbour",
    "a clever crow",
    "a friendly giant",
    "a wise woman",
    "a little star",
)

ENDS: tuple[str, ...] = (
    "From that day on they were best friends.",
    "And everybody in the land was happy.",
    "And so a small deed became a great joy.",
    "That night they danced until the stars went to sleep.",
    "Since then nobody there is ever lonely.",
    "And if they have not moved away, they still live there today.",
)
