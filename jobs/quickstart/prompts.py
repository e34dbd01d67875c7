"""The project's own prompts: templates of many kinds filled with many values.

`make(seed, limit)` is a pure function of its arguments and the words: distinct prompts, shuffled, each with what the teacher is shown
before it (worked examples: a 135M model answers far shorter and better after two of them than after an instruction) and with what a
good answer must contain where the template knows it (the result of a sum, a capital, the past tense), so that wrong answers can be dropped.
"""

# ruff: noqa: E501 (example sentences stay on one line)

import itertools
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from jobs.quickstart import words as w

Shots = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Prompt:
    id: str
    kind: str
    text: str
    shots: Shots
    must: tuple[str, ...] = ()  # each stands in a good answer, as a whole word
    exact: str | None = None  # the one good answer
    number: int | None = None  # the last number of a good answer
    items: int | None = None  # a good answer is a numbered list of so many lines
    call: str | None = None  # a good answer defines a function for which this expression ...
    result: str | None = None  # ... has this value
    parts: tuple["Prompt", ...] = ()  # of a sheet: what it asks, one after the other


DRAWS = 8000  # how often a kind with more combinations than anyone wants draws one

KINDS: dict[str, tuple[int, Callable[[random.Random], Iterator[dict]], Shots]] = {}


def kind(most: int, *shots: tuple[str, str]):
    """Registers a generator of prompts; at most `most` of its distinct prompts are used."""

    def register(function):
        KINDS[function.__name__] = (most, function, shots)
        return function

    return register


def a(noun: str) -> str:
    """The noun with its article, where it has none of its own and can be counted."""
    if noun in ("scissors", "soap"):
        return noun
    return f"{'an' if noun[0] in 'aeiou' and not noun.startswith('uni') else 'a'} {noun}"


def plural(noun: str) -> str:
    irregular = {
        "mouse": "mice",
        "goose": "geese",
        "fox": "foxes",
        "wolf": "wolves",
        "knife": "knives",
        "shelf": "shelves",
        "loaf of bread": "loaves of bread",
    }

    if noun in irregular:
        return irregular[noun]
    if noun in ("deer", "salmon", "goldfish", "moose"):
        return noun
    head, of, rest = noun.partition(" of ")
    if of:
        return plural(head) + of + rest
    if re.search(r"(s|x|ch|sh)$", noun):
        return noun + "es"
    if re.search(r"[^aeiou]y$", noun):
        return noun[:-1] + "ies"
    if noun.endswith("man"):
        return noun[:-2] + "en"
    return noun + "s"


def cross(templates: list[str], **values) -> Iterator[dict]:
    """Every template with every combination of values."""
    for template, *chosen in itertools.product(templates, *values.values()):
        yield {"text": template.format(**dict(zip(values, chosen, strict=True)))}


@kind(
    2200,
    (
        "Rosa has 6 shells and finds 3 more. How many shells does Rosa have now?",
        "Rosa starts with 6 shells and finds 3 more. 6 + 3 = 9, so Rosa has 9 shells now.",
    ),
    (
        "Paul picked 12 pears in the morning and 5 in the afternoon. How many pears did Paul pick?",
        "Paul picked 12 pears and then 5 more. 12 + 5 = 17, so Paul picked 17 pears.",
    ),
)
def adding(rng):
    templates = [
        "{n} has {x} {t} and gets {y} more. How many {t} does {n} have now?",
        "{n} found {x} {t} on Monday and {y} {t} on Tuesday. How many {t} did {n} find in all?",
        "There are {x} {t} on the table. {n} puts {y} more there. How many {t} are on the table now?",
        "{n} has {x} {t} and {m} has {y} {t}. How many {t} do they have together?",
    ]
    for _ in range(DRAWS):
        n, m = rng.sample(w.NAMES, 2)
        x, y = rng.randint(2, 14), rng.randint(2, 12)
        yield {"text": rng.choice(templates).format(n=n, m=m, x=x, y=y, t=rng.choice(w.COUNTABLE)), "number": x + y}


@kind(
    2200,
    (
        "Rosa has 9 shells and gives 4 to Jane. How many shells does Rosa have left?",
        "Rosa starts with 9 shells and gives 4 away. 9 - 4 = 5, so Rosa has 5 shells left.",
    ),
    (
        "There were 15 pears in a bowl. Paul ate 2 of them. How many pears are left?",
        "There were 15 pears and Paul ate 2. 15 - 2 = 13, so 13 pears are left.",
    ),
)
def taking_away(rng):
    templates = [
        "{n} has {x} {t} and gives {y} to {m}. How many {t} does {n} have left?",
        "There were {x} {t} in a box. {n} took {y} of them. How many {t} are left in the box?",
        "{n} had {x} {t} and lost {y} of them. How many {t} does {n} have now?",
        "{n} has {x} {t}. {m} has {y} fewer. How many {t} does {m} have?",
    ]
    for _ in range(DRAWS):
        n, m = rng.sample(w.NAMES, 2)
        x = rng.randint(4, 18)
        y = rng.randint(1, x - 1)
        yield {"text": rng.choice(templates).format(n=n, m=m, x=x, y=y, t=rng.choice(w.COUNTABLE)), "number": x - y}


@kind(
    2000,
    (
        "There are 3 bowls with 4 pears in each. How many pears are there in all?",
        "There are 3 bowls with 4 pears in each. 3 x 4 = 12, so there are 12 pears in all.",
    ),
    (
        "Rosa reads 5 pages every day. How many pages does Rosa read in 6 days?",
        "Rosa reads 5 pages a day for 6 days. 5 x 6 = 30, so Rosa reads 30 pages.",
    ),
)
def times(rng):
    for _ in range(DRAWS):
        n, x, y = rng.choice(w.NAMES), rng.randint(2, 10), rng.randint(2, 10)
        t, c = rng.choice(w.COUNTABLE), rng.choice(w.CONTAINERS)
        template = rng.choice(
            [
                "There are {x} {c} with {y} {t} in each. How many {t} are there in all?",
                "{n} has {x} {c}. Each one holds {y} {t}. How many {t} does {n} have?",
                "{n} collects {y} {t} every day. How many {t} does {n} collect in {x} days?",
                "{n} gives {y} {t} to each of {x} friends. How many {t} does {n} give away?",
            ]
        )
        yield {"text": template.format(n=n, x=x, y=y, t=t, c=c), "number": x * y}


@kind(
    1600,
    (
        "Rosa shares 12 shells equally among 3 friends. How many shells does each friend get?",
        "Rosa shares 12 shells among 3 friends. 12 / 3 = 4, so each friend gets 4 shells.",
    ),
    (
        "Paul puts 20 pears into 4 bowls, the same number in each. How many pears are in each bowl?",
        "Paul puts 20 pears into 4 bowls. 20 / 4 = 5, so each bowl has 5 pears.",
    ),
)
def sharing(rng):
    for _ in range(DRAWS):
        n, x, y = rng.choice(w.NAMES), rng.randint(2, 10), rng.randint(2, 10)
        t, c = rng.choice(w.COUNTABLE), rng.choice(w.CONTAINERS)
        template = rng.choice(
            [
                "{n} shares {z} {t} equally among {x} friends. How many {t} does each friend get?",
                "{n} puts {z} {t} into {x} {c}, the same number in each. How many {t} are in each?",
                "{z} {t} are split equally between {x} children. How many {t} does each child get?",
            ]
        )
        yield {"text": template.format(n=n, x=x, z=x * y, t=t, c=c), "number": y}


@kind(
    1600,
    ("A rose costs 3 dollars. How much do 4 roses cost?", "Each rose costs 3 dollars. 3 x 4 = 12, so 4 roses cost 12 dollars."),
    (
        "Rosa has 20 dollars and buys a vase for 8 dollars. How much money does Rosa have left?",
        "Rosa has 20 dollars and spends 8. 20 - 8 = 12, so Rosa has 12 dollars left.",
    ),
)
def money(rng):
    for _ in range(DRAWS):
        n, t, x, y = rng.choice(w.NAMES), rng.choice(w.PRICED), rng.randint(2, 10), rng.randint(2, 10)
        if rng.random() < 0.5:
            yield {"text": f"{a(t).capitalize()} costs {x} dollars. How much do {y} {plural(t)} cost?", "number": x * y}
        else:
            have = rng.choice([8, 10, 12, 14, 15, 18, 20])
            cost = rng.randint(2, have - 1)
            yield {
                "text": f"{n} has {have} dollars and buys {a(t)} for {cost} dollars. How much money does {n} have left?",
                "number": have - cost,
            }


@kind(1500, ("What is 6 + 3?", "6 + 3 = 9."), ("What is 14 - 5?", "14 - 5 = 9."), ("Calculate 7 x 4.", "7 x 4 = 28."))
def sums(rng):
    for _ in range(DRAWS):
        sign = rng.choice("+-x")
        x, y = (rng.randint(2, 12), rng.randint(2, 10)) if sign == "x" else (rng.randint(2, 40), rng.randint(2, 20))
        if sign == "-" and x < y:
            x, y = y, x
        result = {"+": x + y, "-": x - y, "x": x * y}[sign]
        yield {"text": rng.choice(["What is {}?", "Calculate {}.", "How much is {}?"]).format(f"{x} {sign} {y}"), "number": result}


@kind(
    2000,
    ("What is a rug?", "A rug is a thick piece of cloth that covers part of a floor."),
    ("What is a mop used for?", "A mop is used to wash floors with water and soap."),
    ("Why is a stool useful?", "A stool is useful because it gives you a place to sit and is easy to move."),
    ("Explain to a child what a cork is.", "A cork is a small soft plug that keeps the drink inside a bottle."),
    ("Where would you find a pew?", "You would find a pew in a church."),
)
def things(rng):
    forms = [
        "What is {t}?",
        "What is {t} used for?",
        "Describe {t} in one sentence.",
        "Why is {t} useful?",
        "Where would you find {t}?",
        "Explain to a child what {t} is.",
        "How do you use {t}?",
        "Who uses {t}?",
        "What can you do with {t}?",
        "Tell me about {t}.",
    ]
    return cross(forms, t=[a(t) for t in w.THINGS])


@kind(
    1200,
    ("Where do worms live?", "Worms live in damp soil, where they dig small tunnels."),
    ("What do robins eat?", "Robins eat worms, insects and berries."),
    ("Tell me a fact about parakeets.", "Parakeets are small, colorful birds that can learn to copy words."),
    ("How do porcupines stay safe?", "Porcupines stay safe with sharp quills that keep other animals away."),
    ("What are geese?", "Geese are large birds with long necks that live near water."),
)
def animals(rng):
    forms = [
        "Where do {t} live?",
        "What do {t} eat?",
        "Tell me a fact about {t}.",
        "How do {t} stay safe?",
        "What are {t}?",
        "Describe {t} in one sentence.",
        "Tell a child about {t}.",
        "What are {t} known for?",
    ]
    return cross(forms, t=[plural(t) for t in w.ANIMALS])


@kind(
    500,
    ("What does a fig taste like?", "A fig tastes sweet and mild."),
    ("What goes well with cabbage?", "Cabbage goes well with carrots, apples and vinegar."),
    ("Why do people like raisins?", "People like raisins because they are sweet, small and easy to carry."),
    ("Describe a waffle in one sentence.", "A waffle is a crisp, flat cake with a pattern of small squares."),
    ("How do you store flour?", "Store flour in a closed jar in a cool, dry place."),
)
def foods(rng):
    return cross(
        [
            "What goes well with {t}?",
            "How do you store {t}?",
            "Describe {t} in one sentence.",
            "Why do people like {t}?",
            "When do people have {t}?",
            "Tell me about {t}.",
        ],
        t=w.FOODS,
    )


@kind(
    400,
    ("How do I make a cup of cocoa?", "Warm some milk, stir in cocoa and sugar, and serve it hot."),
    ("What do I need to make waffles?", "You need flour, eggs, milk, sugar and butter."),
    ("What can I serve with fish cakes?", "You can serve fish cakes with a salad or with potatoes."),
    ("How do I make a cheese toast?", "Put cheese on a slice of bread and bake it until the cheese melts."),
    ("Why is onion soup popular?", "Onion soup is popular because it is warm, cheap and full of flavor."),
)
def dishes(rng):
    forms = [
        "How do I make {t}?",
        "What do I need to make {t}?",
        "What can I serve with {t}?",
        "Why is {t} popular?",
        "Tell me how to make {t}.",
        "When is a good time to serve {t}?",
    ]
    return cross(forms, t=w.DISHES)


@kind(
    900,
    ("What can you do at a theme park?", "At a theme park you can ride roller coasters, eat snacks and watch shows."),
    ("Describe a valley in one sentence.", "A valley is a low area of land between hills."),
    ("What is a pharmacy?", "A pharmacy is a shop where people buy medicine."),
    ("Why do people go to a spa?", "People go to a spa to rest and to feel better."),
    ("What sounds can you hear at a racetrack?", "At a racetrack you can hear loud engines and cheering people."),
)
def places(rng):
    forms = [
        "What can you do at {t}?",
        "Describe {t} in one sentence.",
        "What is {t}?",
        "Why do people go to {t}?",
        "What sounds can you hear at {t}?",
        "What can you see at {t}?",
        "Tell me something about {t}.",
        "What can children learn at {t}?",
    ]
    return cross(forms, t=[a(t) for t in w.PLACES])


@kind(
    800,
    ("What does a jeweler do?", "A jeweler makes, repairs and sells rings and necklaces."),
    ("Why are janitors important?", "Janitors are important because they keep buildings clean and safe."),
    ("Where does a miner work?", "A miner works under the ground in a mine."),
    ("What is hard about being a clown?", "Being a clown is hard because you must be funny even on a sad day."),
    ("How do referees help people?", "Referees help people by making sure that a game is fair."),
)
def jobs(rng):
    return itertools.chain(
        cross(
            [
                "What does {t} do?",
                "What tools does {t} use?",
                "Where does {t} work?",
                "Describe the work of {t} in one sentence.",
                "What skills does {t} need?",
                "What is hard about being {t}?",
                "What is fun about being {t}?",
                "What is {t}?",
            ],
            t=[a(t) for t in w.JOBS],
        ),
        cross(["Why are {t} important?", "How do {t} help people?"], t=[plural(t) for t in w.JOBS]),
    )


@kind(
    1200,
    ("How do I keep a pan from sticking?", "Heat the pan first and add a little oil before the food."),
    ("Give me a tip to learn juggling.", "Start with two soft balls and practice slow, even throws."),
    ("What is the best way to dry herbs?", "The best way is to hang them upside down in a warm, dry room."),
    ("Why should I learn to fix a chair?", "You can save money and keep a good chair for many years."),
    ("What do I need to polish a spoon?", "You need a soft cloth, warm water and a little polish."),
)
def tasks(rng):
    forms = [
        "How do I {t}?",
        "Give me a tip to {t}.",
        "What is the best way to {t}?",
        "Why should I learn to {t}?",
        "What do I need to {t}?",
        "Tell a child how to {t}.",
        "How can I {t}?",
    ]
    return cross(forms, t=w.TASKS)


@kind(
    500,
    ("List three steps to make toast.", "1. Put a slice of bread in the toaster.\n2. Wait until it is golden.\n3. Spread butter on it."),
    ("List three steps to mail a parcel.", "1. Pack the item in a box.\n2. Write the address on it.\n3. Take it to the post office."),
    (
        "List three steps to make a snowman.",
        "1. Roll three big balls of snow.\n2. Put them on top of each other.\n3. Add a carrot for the nose.",
    ),
    ("List three steps to borrow a bicycle.", "1. Ask the owner for permission.\n2. Ride it with care.\n3. Bring it back on time."),
)
def steps(rng):
    forms = ["List three steps to {t}.", "Give me three steps to {t}.", "What are three steps to {t}?", "Write three short steps to {t}."]
    return ({**p, "items": 3} for p in cross(forms, t=w.TASKS))


@kind(
    1100,
    ("List three kinds of boxes.", "1. Cardboard box\n2. Wooden box\n3. Gift box"),
    ("List three things you see in the sky.", "1. The sun\n2. Clouds\n3. Birds"),
)
def lists(rng):
    plain = cross(
        [
            "List three {t}.",
            "Name three {t}.",
            "Give me a list of three {t}.",
            "Write down three {t}.",
            "Can you list three {t}?",
            "What are three {t}?",
            "Tell me three {t}.",
        ],
        t=w.CATEGORIES,
    )
    seen = cross(
        [
            "List three things you can find in {t}.",
            "Name three things you see at {t}.",
            "List three things to do at {t}.",
            "List three people you meet at {t}.",
        ],
        t=[a(t) for t in w.PLACES],
    )
    used = cross(
        ["List three tools that {t} uses.", "List three tasks of {t}.", "List three good qualities of {t}."], t=[a(t) for t in w.JOBS]
    )
    return ({**p, "items": 3} for p in itertools.chain(plain, seen, used))


@kind(
    400,
    ("List five kinds of boxes.", "1. Cardboard box\n2. Wooden box\n3. Gift box\n4. Lunch box\n5. Tool box"),
    ("List five things you see in the sky.", "1. The sun\n2. The moon\n3. Clouds\n4. Birds\n5. Stars"),
)
def long_lists(rng):
    return (
        {**p, "items": 5}
        for p in cross(
            ["List five {t}.", "Name five {t}.", "Give me a list of five {t}.", "What are five {t}?", "Write down five {t}."],
            t=w.CATEGORIES,
        )
    )


@kind(
    2600,
    (
        "Write a two-sentence story about a clumsy goose in a windy field.",
        "A clumsy goose lived in a windy field. One day she lost her hat, and a kind boy brought it back to her.",
    ),
    (
        "Write a two-sentence story about a sad pony in a cold barn.",
        "A sad pony lived in a cold barn. One day a girl gave him a warm blanket, and he was happy at last.",
    ),
    (
        "Write a two-sentence story about a bold hen in a tall tower.",
        "A bold hen lived in a tall tower. One day she flew down to the town, and everyone clapped for her.",
    ),
    (
        "Write a two-sentence story about a gentle ox in a muddy field.",
        "A gentle ox lived in a muddy field. One day a cart got stuck, and he pulled it out with all his strength.",
    ),
)
def animal_stories(rng):
    forms = [
        "Write a two-sentence story about {aa} {t} in {p}.",
        "Tell me a two-sentence story about {aa} {t} in {p}.",
        "Write a short story about {aa} {t} in {p}.",
    ]
    for _ in range(DRAWS):
        yield {
            "text": rng.choice(forms).format(aa=a(rng.choice(w.ADJECTIVES)), t=rng.choice(w.ANIMALS[:60]), p=a(rng.choice(w.STORY_PLACES)))
        }


@kind(
    2000,
    (
        "Write a short story about Karl and a glass marble.",
        "Karl found a glass marble under a tree. He gave it to his little brother, and they played with it all day.",
    ),
    (
        "Write a short story about Olga and a wooden spoon.",
        "Olga had a wooden spoon from her grandmother. She cooked a big soup with it, and the whole family came to eat.",
    ),
    (
        "Write a short story about Hugo and a small mirror.",
        "Hugo bought a small mirror at the fair. He used it to catch the sunlight, and his cat chased the bright spot.",
    ),
    (
        "Write a short story about Irma and a green bottle.",
        "Irma found a green bottle on the shore. There was a letter in it, and she wrote back the same evening.",
    ),
)
def people_stories(rng):
    forms = [
        "Write a short story about {n} and {t}.",
        "Tell me a short story about {n} and {t}.",
        "Write a two-sentence story about {n} and {t}.",
    ]
    return cross(forms, n=w.NAMES, t=[a(t) for t in w.STORY_ITEMS])


@kind(
    1600,
    (
        "Write a short note to thank my landlord for the new key.",
        "Dear landlord, thank you for the new key. It was kind of you to bring it so quickly.",
    ),
    ("Thank my niece for the drawing in two sentences.", "Dear niece, thank you for the drawing. I smile every time I look at it."),
    ("Help me thank my tailor for mending my coat.", "Dear tailor, thank you for mending my coat. It looks as good as new."),
    (
        "Write a thank-you message to my nephew for washing my car.",
        "Dear nephew, thank you for washing my car. I am proud of your hard work.",
    ),
)
def thanks(rng):
    return cross(
        [
            "Write a short note to thank {p} for {t}.",
            "Thank {p} for {t} in two sentences.",
            "Help me thank {p} for {t}.",
            "Write a thank-you message to {p} for {t}.",
        ],
        p=w.PEOPLE,
        t=w.FAVORS,
    )


@kind(
    1000,
    (
        "Write a short message to say sorry to my landlord for the noise.",
        "Dear landlord, I am sorry for the noise. I will be more careful from now on.",
    ),
    (
        "Apologize to my niece for burning the toast.",
        "Dear niece, I am sorry for burning the toast. I will make you a fresh one right away.",
    ),
    (
        "Help me say sorry to my tailor for the wrong address.",
        "Dear tailor, I am sorry for the wrong address. I hope it did not cost you too much time.",
    ),
    (
        "Write a short apology to my nephew for missing the game.",
        "Dear nephew, I am sorry for missing the game. I promise to come to the next one.",
    ),
)
def sorry(rng):
    return cross(
        [
            "Write a short message to say sorry to {p} for {t}.",
            "Apologize to {p} for {t}.",
            "Help me say sorry to {p} for {t}.",
            "Write a short apology to {p} for {t}.",
        ],
        p=w.PEOPLE,
        t=w.MISTAKES,
    )


@kind(
    1500,
    (
        "Invite my landlord to a card evening on Tuesday.",
        "Dear landlord, I am having a card evening on Tuesday. I would love to see you there.",
    ),
    (
        "Write a short invitation for my niece to a puppet show next month.",
        "Dear niece, you are invited to a puppet show next month. It will be a lot of fun.",
    ),
    (
        "Ask my tailor to come to a street fair on Thursday.",
        "Dear tailor, there is a street fair on Thursday. Would you like to come with me?",
    ),
    ("Invite my nephew to a boat trip this summer.", "Dear nephew, we are going on a boat trip this summer. Please come with us."),
)
def invitations(rng):
    return cross(
        ["Invite {p} to a {t} {d}.", "Write a short invitation for {p} to a {t} {d}.", "Ask {p} to come to a {t} {d}."],
        p=w.PEOPLE,
        t=w.EVENTS,
        d=w.TIMES,
    )


@kind(
    700,
    ('Use the word "ladder" in a sentence.', "He climbed the ladder to reach the roof."),
    ('Write a sentence with the word "velvet".', "The queen wore a long dress of red velvet."),
    ('Make a sentence with "hurry".', "We had to hurry to catch the last train."),
    ('Use the word "stubborn" in a sentence.', "The stubborn donkey did not want to move."),
)
def sentences(rng):
    return (
        {**p, "must": (x,)}
        for x in w.WORDS
        for p in cross(['Use the word "{x}" in a sentence.', 'Write a sentence with the word "{x}".', 'Make a sentence with "{x}".'], x=[x])
    )


@kind(
    1100,
    ('What does the word "eager" mean?', "Eager means wanting very much to do or have something."),
    ('Define the word "orchard".', "An orchard is a piece of land where fruit trees grow."),
    ('What does "hesitate" mean?', "To hesitate means to wait a moment before you act."),
    ('Give me a simple definition of "gratitude".', "Gratitude is the feeling of being thankful."),
)
def meanings(rng):
    forms = [
        'What does the word "{x}" mean?',
        'Define the word "{x}".',
        'Explain the word "{x}" to a child.',
        'What is the meaning of "{x}"?',
        'Give me a simple definition of "{x}".',
        'What does "{x}" mean?',
    ]
    return cross(forms, x=w.WORDS)


@kind(
    400,
    ("What is the opposite of tight?", "The opposite of tight is loose."),
    ("Give me the opposite of heavy.", "The opposite of heavy is light."),
)
def opposites(rng):
    for x, y in [*w.OPPOSITES.items(), *((y, x) for x, y in w.OPPOSITES.items())]:
        for form in [
            "What is the opposite of {}?",
            "Give me the opposite of {}.",
            "What word means the opposite of {}?",
            "Name the opposite of {}.",
        ]:
            yield {"text": form.format(x), "must": (y,)}


@kind(
    300,
    ("What is the capital of Jordan?", "The capital of Jordan is Amman."),
    ("Name the capital of Nepal.", "The capital of Nepal is Kathmandu."),
)
def capitals(rng):
    for x, y in w.CAPITALS.items():
        for form in [
            "What is the capital of {}?",
            "Name the capital of {}.",
            "Which city is the capital of {}?",
            "Tell me the capital city of {}.",
            "Do you know the capital of {}?",
        ]:
            yield {"text": form.format(x), "must": (y,)}


@kind(150, ("What color is a ripe plum?", "A ripe plum is purple."), ("What color is sand?", "Sand is light brown."))
def colors(rng):
    for x, y in w.COLORS.items():
        for form in ["What color is {}?", "Tell me the color of {}.", "Which color does {} have?", "What is the color of {}?"]:
            yield {"text": form.format(x), "must": (y,)}


@kind(
    1500,
    ("Put this sentence in the past tense: Karl waters the garden.", "Karl watered the garden."),
    ("Put this sentence in the past tense: Olga eats an apple.", "Olga ate an apple."),
    ("Put this sentence in the past tense: Olga writes a card.", "Olga wrote a card."),
)
def past(rng):
    forms = ["Put this sentence in the past tense: {}", "Change this to the past tense: {}", "Write this sentence in the past tense: {}"]
    for _, third, past, objects in w.VERBS:
        for n, o, form in itertools.product(w.NAMES, objects, forms):
            yield {"text": form.format(f"{n} {third} {o}."), "exact": f"{n} {past} {o}."}


@kind(
    1500,
    ("Put this sentence in the future tense: Karl waters the garden.", "Karl will water the garden."),
    ("Put this sentence in the future tense: Olga eats an apple.", "Olga will eat an apple."),
    ("Put this sentence in the future tense: Olga writes a card.", "Olga will write a card."),
)
def future(rng):
    forms = ["Put this sentence in the future tense: {}", "Change this to the future tense: {}"]
    for base, third, _, objects in w.VERBS:
        for n, o, form in itertools.product(w.NAMES, objects, forms):
            yield {"text": form.format(f"{n} {third} {o}."), "exact": f"{n} will {base} {o}."}


@kind(
    1500,
    ("Make this sentence negative: Karl waters the garden.", "Karl does not water the garden."),
    ("Make this sentence negative: Olga eats an apple.", "Olga does not eat an apple."),
    ("Make this sentence negative: Hugo writes a card.", "Hugo does not write a card."),
)
def negative(rng):
    forms = ["Make this sentence negative: {}", "Turn this into a negative sentence: {}"]
    for base, third, _, objects in w.VERBS:
        for n, o, form in itertools.product(w.NAMES, objects, forms):
            yield {"text": form.format(f"{n} {third} {o}."), "exact": f"{n} does not {base} {o}."}


@kind(
    1500,
    ("Turn this sentence into a question: Karl waters the garden.", "Does Karl water the garden?"),
    ("Turn this sentence into a question: Olga eats an apple.", "Does Olga eat an apple?"),
    ("Turn this sentence into a question: Hugo writes a card.", "Does Hugo write a card?"),
)
def questions(rng):
    forms = ["Turn this sentence into a question: {}", "Make a question from this sentence: {}"]
    for base, third, _, objects in w.VERBS:
        for n, o, form in itertools.product(w.NAMES, objects, forms):
            yield {"text": form.format(f"{n} {third} {o}."), "exact": f"Does {n} {base} {o}?"}


@kind(
    150,
    ("Say this politely: Clean the oven.", "Could you please clean the oven?"),
    ("Make this more polite: Give me the keys.", "Could you please give me the keys?"),
)
def polite(rng):
    return cross(
        [
            "Say this politely: {t}",
            "Make this more polite: {t}",
            "Rewrite this in a polite way: {t}",
            "How can I say this politely? {t}",
            "Turn this into a polite request: {t}",
        ],
        t=w.REQUESTS,
    )


@kind(
    2400,
    ("What is the difference between a plum and a cherry?", "A plum is large and soft, while a cherry is small and round."),
    ("What is the difference between a rug and a mat?", "A rug covers a large part of a floor, while a mat lies by the door."),
    ("How is a miner different from a clown?", "A miner works under the ground, while a clown makes people laugh."),
    ("Compare a worm and a robin in one sentence.", "A worm lives in the soil, while a robin is a bird that can fly."),
)
def differences(rng):
    groups = [w.ANIMALS, w.THINGS, w.PLACES, w.JOBS]
    forms = ["What is the difference between {} and {}?", "How is {} different from {}?", "Compare {} and {} in one sentence."]
    for _ in range(DRAWS):
        group = rng.choice(groups)
        i = rng.randrange(len(group) - 3)  # neighbours in the lists have something to do with each other
        yield {"text": rng.choice(forms).format(a(group[i]), a(group[i + rng.randint(1, 3)]))}


@kind(
    1500,
    ("Is a rug an animal or a thing?", "A rug is a thing."),
    ("Is a worm an animal or a place?", "A worm is an animal."),
    ("Is a miner a job or a thing?", "A miner is a job."),
    ("Is a valley a place or an animal?", "A valley is a place."),
)
def sorting(rng):
    groups = {"an animal": w.ANIMALS, "a thing": w.THINGS, "a place": w.PLACES, "a job": w.JOBS}
    for right, wrong in itertools.permutations(groups, 2):
        for x in groups[right]:
            first, second = rng.sample([right, wrong], 2)
            yield {"text": f"Is {a(x)} {first} or {second}?", "must": (right,), "exact": f"{a(x).capitalize()} is {right}."}


@kind(
    300,
    ("What is the plural of rug?", "The plural of rug is rugs."),
    ("What is the plural of story?", "The plural of story is stories."),
    ("What is the plural of bush?", "The plural of bush is bushes."),
)
def plurals(rng):
    nouns = [x for x in w.ANIMALS + w.THINGS + w.JOBS + w.PLACES if " " not in x and x not in ("scissors", "soap", "glue")]
    for x in nouns:
        for form in ["What is the plural of {}?", "Give me the plural of {}."]:
            yield {"text": form.format(x), "exact": f"The plural of {x} is {plural(x)}."}


@kind(
    250,
    ("Which number comes after 41?", "The number after 41 is 42."),
    ("Which number comes before 68?", "The number before 68 is 67."),
    ("Which number comes after 99?", "The number after 99 is 100."),
)
def counting(rng):
    for x in range(2, 121):
        yield {"text": f"Which number comes after {x}?", "exact": f"The number after {x} is {x + 1}."}
        yield {"text": f"Which number comes before {x}?", "exact": f"The number before {x} is {x - 1}."}


@kind(
    600,
    ("Why do people like archery?", "People like archery because it is calm and needs a steady hand."),
    ("What do you need for fencing?", "For fencing you need a sword, a mask and a thick jacket."),
    ("Give me a reason to try karate.", "Karate makes you strong and teaches you to stay calm."),
    ("How can I get better at darts?", "You can get better at darts by throwing from the same spot every day."),
    ("What is origami?", "Origami is the art of folding paper into shapes."),
)
def activities(rng):
    forms = [
        "Why do people like {t}?",
        "What do you need for {t}?",
        "Give me a reason to try {t}.",
        "How can I get better at {t}?",
        "What is {t}?",
        "Give me a tip for {t}.",
        "What can you learn from {t}?",
        "How does {t} help you relax?",
    ]
    return cross(forms, t=w.ACTIVITIES)


@kind(
    1500,
    ("Write a Python function named triple that multiplies a number by three.", "```python\ndef triple(x):\n    return x * 3\n```"),
    ("Define a Python function half that divides a number by two.", "```python\ndef half(x):\n    return x / 2\n```"),
    (
        "In Python, write a function is_long(text) that checks whether a string has more than ten characters.",
        "```python\ndef is_long(text):\n    return len(text) > 10\n```",
    ),
    (
        "Show me a Python function called add_comma that joins two names with a comma.",
        '```python\ndef add_comma(first, second):\n    return first + ", " + second\n```',
    ),
)
def code(rng):
    forms = [
        "Write a Python function named {name} that {does}.",
        "In Python, write a function {name}({args}) that {does}.",
        "Define a Python function {name} that {does}.",
        "Show me a Python function called {name} that {does}.",
        "Write {name}({args}) in Python. It {does}.",
    ]
    for (does, name, args, example, result), form in itertools.product(w.CODE, forms):
        for alias in (name, f"get_{name}", f"my_{name}", f"{name}_value", f"do_{name}"):
            yield {"text": form.format(name=alias, does=does, args=args), "call": f"{alias}{example}", "result": result}


def make(seed: int, limit: int | None = None) -> list[Prompt]:
    """Distinct prompts of all kinds in an order that depends on the seed alone; `limit` keeps the first so many."""
    made: dict[str, Prompt] = {}
    for name, (most, generate, shots) in KINDS.items():
        rng = random.Random(f"{seed}-{name}")
        fields = list({f["text"]: f for f in generate(rng) if f["text"] not in made}.values())
        rng.shuffle(fields)
        for i, f in enumerate(fields[:most]):
            made[f["text"]] = Prompt(id=f"{name}-{i:05d}", kind=name, shots=shots, **f)
    prompts = list(made.values())
    random.Random(seed).shuffle(prompts)
    return prompts[:limit]
