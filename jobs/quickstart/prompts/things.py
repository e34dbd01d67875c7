"""What things are, and lists of them."""

# ruff: noqa: E501 (example sentences stay on one line)

import itertools

from jobs.quickstart.prompts import words as w
from jobs.quickstart.prompts.prompt import Kinds, a, cross, plural

kind = Kinds()


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
