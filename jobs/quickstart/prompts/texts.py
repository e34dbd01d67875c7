"""Short texts: stories, letters, invitations, sentences."""

# ruff: noqa: E501 (example sentences stay on one line)

from jobs.quickstart.prompts import words as w
from jobs.quickstart.prompts.prompt import DRAWS, Kinds, a, cross

kind = Kinds()


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
