"""The words that fill the prompt templates. Plain data: adding a word adds prompts, nothing else depends on it."""


def _split(text: str) -> list[str]:
    return [w.strip() for w in text.replace("\n", " ").split(",") if w.strip()]


NAMES = _split("""
Tom, Anna, Ben, Maria, Sam, Lucy, Omar, Nina, Leo, Emma, Jack, Sara, Paul, Mia, David, Ella, Max, Ruth, Ivan, Kate, Luis, Amy, Noah, Lena,
Peter, Zoe, Adam, Rosa, Mark, Jane""")

COUNTABLE = _split("""
apples, books, pencils, marbles, stickers, cookies, coins, balloons, shells, oranges, eggs, cards, stamps, buttons, toys, flowers,
candles, stones, beads, lemons, cups, tickets, muffins, pears, crayons, plums, ribbons, keys, photos, nuts""")

CONTAINERS = _split("boxes, bags, baskets, trays, jars, shelves, rows, packs, drawers, crates")

PRICED = _split("""
book, pen, hat, ball, cake, sandwich, ticket, lamp, mug, plant, scarf, puzzle, brush, kite, notebook, toy car, bottle of juice, bag of
rice, box of tea, loaf of bread""")

THINGS = _split("""
hammer, clock, mirror, pillow, ladder, candle, kettle, broom, umbrella, pencil, bicycle, bridge, camera, compass, lamp, key, map, needle,
spoon, fork, knife, plate, bowl, cup, bottle, bucket, basket, blanket, towel, soap, toothbrush, comb, scissors, ruler, notebook, backpack,
wallet, hat, glove, scarf, raincoat, boot, sandal, button, zipper, belt, ring, watch, telephone, radio, television, computer, keyboard,
printer, battery, light bulb, magnet, telescope, microscope, thermometer, calculator, calendar, envelope, stamp, newspaper, dictionary,
library card, piano, guitar, drum, violin, flute, whistle, bell, kite, balloon, puzzle, doll, ball, swing, tent, sleeping bag, flashlight,
rope, net, anchor, boat, canoe, sailboat, train, bus, truck, airplane, helicopter, rocket, tractor, shovel, rake, wheelbarrow, hose,
watering can, fence, gate, door, window, curtain, carpet, chair, table, desk, shelf, drawer, bed, sofa, oven, stove, refrigerator,
toaster, blender, frying pan, cutting board, napkin, vase, picture frame, paintbrush, crayon, chalkboard, glue stick, stapler, paper clip,
tape measure, screwdriver, wrench, nail, saw, paint roller, wheel, engine, elevator, escalator, traffic light, lighthouse, windmill, well,
fountain, bench, mailbox, trash can, fire extinguisher, first aid kit, bandage, wheelchair, pair of glasses, hearing aid, alarm clock,
fan, heater, vacuum cleaner, washing machine, iron, sewing machine, lock, chain, helmet, life jacket, parachute, trophy, medal, flag,
globe, coin, piggy bank, shopping cart""")

ANIMALS = _split("""
dog, cat, horse, cow, sheep, goat, pig, rabbit, mouse, squirrel, fox, wolf, bear, deer, lion, tiger, elephant, giraffe, zebra, monkey,
gorilla, kangaroo, koala, panda, camel, hippo, rhino, whale, dolphin, shark, seal, otter, octopus, crab, lobster, turtle, frog, snake,
lizard, crocodile, eagle, owl, parrot, penguin, duck, swan, chicken, turkey, ostrich, flamingo, pigeon, crow, bat, hedgehog, beaver,
raccoon, skunk, bee, ant, butterfly, spider, snail, beetle, ladybug, salmon, goldfish, jellyfish, hamster, donkey, moose""")

FOODS = _split("""
bread, cheese, rice, pasta, soup, salad, pizza, an apple, a banana, an orange, a lemon, a carrot, a potato, a tomato, an onion, garlic,
honey, butter, yogurt, milk, chocolate, ice cream, oatmeal, popcorn, a pancake, a sandwich, a burger, a taco, sushi, a curry, beans,
lentils, corn, broccoli, spinach, a cucumber, a pumpkin, a strawberry, a grape, a melon, a pineapple, a mango, a peach, a cherry, a
coconut, peanut butter, jam, mustard, tea, coffee, lemonade, hot chocolate, a smoothie, fish, chicken, an egg, tofu, a mushroom, a pepper,
ginger, cinnamon""")

DISHES = _split("""
a cup of tea, scrambled eggs, a fruit salad, a cheese sandwich, tomato soup, pancakes, mashed potatoes, fried rice, a green salad,
lemonade, hot chocolate, popcorn, toast with jam, a smoothie, pasta with tomato sauce, a baked potato, vegetable soup, an omelet, rice
pudding, garlic bread, oatmeal, boiled eggs, roast chicken, a banana milkshake, apple pie, chicken soup, a tuna sandwich, iced tea,
guacamole, french toast, potato salad, chocolate cookies, muffins, banana bread, a vegetable curry, bean stew""")

PLACES = _split("""
park, library, school, hospital, museum, zoo, farm, beach, forest, market, bakery, train station, airport, supermarket, restaurant,
garden, playground, post office, bank, theater, cinema, castle, harbor, river, lake, mountain, desert, jungle, village, city, island,
cave, meadow, kitchen, bathroom, bedroom, garage, attic, basement, office, factory, gym, swimming pool, stadium, hotel, campsite, bus
stop, bookstore, toy store, pet store, fire station, police station, barn, greenhouse, bridge, lighthouse, aquarium, concert hall,
classroom, laboratory""")

JOBS = _split("""
teacher, doctor, nurse, farmer, baker, carpenter, plumber, pilot, firefighter, police officer, cook, waiter, gardener, painter, writer,
singer, dentist, librarian, mechanic, engineer, scientist, artist, tailor, butcher, fisherman, sailor, bus driver, truck driver, mail
carrier, cashier, programmer, photographer, journalist, lawyer, judge, architect, builder, electrician, hairdresser, veterinarian,
pharmacist, musician, dancer, actor, coach, lifeguard, tour guide, translator, astronaut, beekeeper, florist, shoemaker, potter,
zookeeper, secretary, accountant, cleaner, guard""")

TASKS = _split("""
sleep better, learn a new language, save money, cook rice, clean a window, plant a tree, write a letter, make new friends, stay healthy,
ride a bicycle, wash a car, fold a shirt, iron a shirt, pack a suitcase, paint a wall, fix a flat tire, sharpen a pencil, tie a shoe, take
a good photo, draw a cat, read faster, study for a test, give a speech, wake up early, drink more water, eat more vegetables, calm down,
train a dog, feed a cat, grow tomatoes, water house plants, keep a room tidy, organize a desk, plan a trip, choose a book, buy a gift,
wrap a present, bake bread, boil an egg, peel an onion, store food, wash dishes, do the laundry, remove a stain, sew on a button, hang a
picture, build a shelf, change a light bulb, start a fire at a campsite, set up a tent, swim, run a long race, lift a heavy box, stretch
before exercise, prepare for a job interview, write a resume, ask for help, say sorry, solve a problem, make a decision, remember names,
listen well, be kind, be on time, keep a diary, learn to draw, play the guitar, sing better, learn to dance, play chess, teach a child to
read, save energy at home, save water, recycle paper, clean up a park, cross a street safely, stay safe in a storm, treat a small cut,
cool down on a hot day, keep warm in winter, avoid getting sick, brush your teeth, wash your hands, care for a baby, visit a museum, use a
map, find a lost key, write a story, learn math, type faster, protect a password, back up a computer, send an email, make a budget, start
a garden, feed birds, care for a fish, clean shoes, make a bed, set the table, host a party, plan a picnic, relax after work""")

ACTIVITIES = _split("""
reading, swimming, running, hiking, cooking, baking, painting, drawing, singing, dancing, fishing, camping, gardening, cycling, skating,
skiing, sailing, climbing, knitting, sewing, writing, traveling, gaming, chess, yoga, walking, bird watching, photography, pottery,
juggling, surfing, rowing, bowling, tennis, football, basketball, volleyball, badminton, table tennis, horse riding, woodworking,
stargazing, collecting stamps, playing the piano, playing the drums, learning languages, solving puzzles, telling stories, flying kites,
volunteering""")

ADJECTIVES = _split("""
small, brave, lazy, clever, shy, happy, hungry, lonely, kind, curious, old, young, noisy, gentle, proud, sleepy, lost, friendly, funny,
tiny, grumpy, playful, quiet, wise, busy""")

STORY_PLACES = _split("""
forest, garden, village, big city, snowy mountain, quiet lake, old castle, sunny beach, small farm, dark cave, green meadow, busy market,
library, desert, jungle, river, train station, kitchen, school, harbor""")

STORY_ITEMS = _split("""
red kite, lost key, magic seed, old map, broken clock, golden coin, blue umbrella, paper boat, music box, new bicycle, secret letter, warm
scarf, big pumpkin, silver bell, little lamp, yellow balloon, birthday cake, wooden box, tiny door, shiny stone""")

PEOPLE = _split("""
my teacher, my neighbor, my sister, my brother, my friend, my grandmother, my grandfather, my boss, my aunt, my uncle, my coach, my
doctor, my classmate, my cousin, my roommate, my colleague""")

FAVORS = _split("""
the birthday gift, helping me move, the lovely dinner, the flowers, watching my cat, fixing my bicycle, the advice, the ride to work, the
book, the homemade cake, watering my plants, teaching me to cook, the concert tickets, the kind words, the help with my homework, the warm
welcome, the photos, lending me a ladder, the coffee, cleaning the kitchen""")

MISTAKES = _split("""
being late, forgetting the meeting, breaking a cup, losing the book, missing the party, the loud music, not calling back, spilling the
coffee, forgetting your birthday, stepping on your foot, waking you up, the mix-up, eating the last cookie, leaving the door open, the
late reply""")

EVENTS = _split("""
birthday party, picnic, dinner, game night, movie night, garden party, school play, concert, wedding, book club, barbecue, farewell party,
soccer match, art show, housewarming party, tea party, camping trip, cooking class""")

TIMES = _split("on Friday, on Saturday, on Sunday, tomorrow, next week, tonight, this weekend, on Monday evening")

WORDS = _split("""
brave, honest, patient, gentle, curious, generous, lazy, proud, quiet, rapid, ancient, modern, fragile, sturdy, bright, dim, calm, stormy,
empty, crowded, famous, rare, common, useful, harmless, dangerous, careful, cheerful, gloomy, grateful, jealous, lonely, nervous,
confident, polite, rude, wealthy, poor, healthy, sick, wild, tame, narrow, wide, shallow, deep, rough, smooth, sharp, dull, journey,
promise, secret, reward, mistake, habit, hobby, neighbor, stranger, guest, leader, hero, friend, enemy, family, freedom, peace, courage,
wisdom, knowledge, memory, dream, hope, fear, anger, joy, sorrow, surprise, trust, luck, success, failure, effort, patience, kindness,
justice, truth, beauty, strength, energy, balance, harvest, horizon, shadow, echo, breeze, shelter, treasure, voyage, festival, ceremony,
tradition, culture, history, science, nature, climate, planet, galaxy, ocean, valley, volcano, glacier, island, border, market, village,
market stall, bargain, budget, profit, salary, borrow, lend, gather, scatter, climb, wander, whisper, shout, listen, observe, imagine,
invent, discover, explore, protect, repair, improve, increase, reduce, compare, choose, decide, explain, describe, argue, agree, forgive,
apologize, celebrate, encourage, admire, respect, obey, ignore, refuse, accept, create, destroy, collect, share, compete, cooperate,
practice, succeed, struggle, survive, adapt, migrate, hibernate, evaporate, freeze, melt""")

OPPOSITES = dict(
    p.split("-")
    for p in _split("""
hot-cold, big-small, tall-short, fast-slow, happy-sad, day-night, up-down, in-out, open-closed, light-dark, hard-soft, wet-dry,
full-empty, old-new, rich-poor, strong-weak, loud-quiet, clean-dirty, early-late, near-far, high-low, thick-thin, wide-narrow,
deep-shallow, sweet-sour, true-false, right-wrong, left-right, first-last, before-after, above-below, inside-outside, push-pull, win-lose,
buy-sell, give-take, start-stop, love-hate, laugh-cry, arrive-leave, remember-forget, rough-smooth, sharp-dull, brave-cowardly,
polite-rude, safe-dangerous, simple-complex, always-never""")
)

CAPITALS = dict(
    p.split("-")
    for p in _split("""
France-Paris, Germany-Berlin, Italy-Rome, Spain-Madrid, Portugal-Lisbon, England-London, Ireland-Dublin, Norway-Oslo, Sweden-Stockholm,
Finland-Helsinki, Denmark-Copenhagen, Poland-Warsaw, Austria-Vienna, Hungary-Budapest, Greece-Athens, Turkey-Ankara, Russia-Moscow,
China-Beijing, Japan-Tokyo, South Korea-Seoul, India-New Delhi, Thailand-Bangkok, Vietnam-Hanoi, Indonesia-Jakarta, Australia-Canberra,
New Zealand-Wellington, Egypt-Cairo, Kenya-Nairobi, Morocco-Rabat, Ghana-Accra, Ethiopia-Addis Ababa, Canada-Ottawa, Mexico-Mexico City,
Cuba-Havana, Argentina-Buenos Aires, Chile-Santiago, Peru-Lima, Iran-Tehran, Iraq-Baghdad, Belgium-Brussels, the Netherlands-Amsterdam,
Switzerland-Bern, Ukraine-Kyiv, Romania-Bucharest, Bulgaria-Sofia, the Czech Republic-Prague, the United States-Washington""")
)

COLORS = dict(
    p.split("-")
    for p in _split("""
a ripe banana-yellow, a clear sky-blue, fresh grass-green, snow-white, coal-black, a ripe tomato-red, an orange-orange, a carrot-orange, a
lemon-yellow, milk-white, an elephant-gray, a frog-green, a flamingo-pink, chocolate-brown, a polar bear-white, a crow-black, the
sun-yellow, a strawberry-red, spinach-green, a fire truck-red, a school bus-yellow, a swan-white, a leaf in summer-green, the deep
ocean-blue""")
)

CATEGORIES = _split("""
fruits, vegetables, colors, farm animals, wild animals, pets, birds, insects, trees, flowers, sports, board games, musical instruments,
school subjects, kitchen tools, garden tools, office supplies, pieces of furniture, kinds of weather, seasons of the year, days of the
week, months of the year, planets, oceans, continents, kinds of transport, jobs, hobbies, kinds of food, breakfast foods, desserts,
drinks, herbs, spices, clothes, winter clothes, shapes, parts of the body, parts of a house, parts of a car, parts of a plant, good
habits, healthy snacks, ways to relax, ways to save money, ways to save energy, ways to help a neighbor, ways to say thank you, things to
pack for a trip, things to take to the beach, things to do on a rainy day, things to do in winter, things that are round, things that are
red, things that can fly, things that float, things made of wood, things made of glass, things made of paper, gifts for a friend, gifts
for a child, games for children, rules for a classroom, uses for a cardboard box, uses for a spoon, uses for water, reasons to exercise,
reasons to read books, reasons to plant trees, reasons to sleep well, questions to ask a new friend, names for a dog, names for a cat,
topics for a short talk, kinds of cheese, kinds of bread, kinds of shoes, kinds of boats, rooms in a house""")

# base form, third person, past, with objects that fit
VERBS = [
    (base, third, past, _split(objects.replace(";", ",")))
    for base, third, past, objects in (
        line.split("|")
        for line in """
walk|walks|walked|to school;to the park;along the river;home after work
play|plays|played|football;chess with a friend;the piano;in the garden
cook|cooks|cooked|dinner;a big pot of soup;rice and beans;breakfast for the family
clean|cleans|cleaned|the kitchen;the windows;the car;a dusty shelf
paint|paints|painted|a picture;the old fence;the wall blue;a small boat
visit|visits|visited|the museum;a friend;the zoo;an old castle
wash|washes|washed|the dishes;the dog;a red car;a pile of clothes
open|opens|opened|the door;a letter;the window;a jar of honey
watch|watches|watched|a movie;the birds;the sunset;the rain
help|helps|helped|a neighbor;the teacher;a lost child;an old man
plant|plants|planted|a tree;some flowers;tomatoes;a row of beans
carry|carries|carried|a heavy bag;the books;a basket of fruit;the groceries
study|studies|studied|for a test;the map;history;the stars
climb|climbs|climbed|the hill;a tall tree;the stairs;a ladder
write|writes|wrote|a letter;a short poem;a long list;a story
read|reads|read|a book;the newspaper;a recipe;a story to a child
eat|eats|ate|an apple;a sandwich;lunch at noon;a bowl of soup
drink|drinks|drank|some water;a cup of tea;cold milk;lemonade
drive|drives|drove|to work;a small truck;the bus;along the coast
ride|rides|rode|a bicycle;a horse;the train;to the market
find|finds|found|a coin;the lost key;a quiet place;an old map
make|makes|made|a cake;a paper boat;a plan;some tea
buy|buys|bought|fresh bread;a new hat;two tickets;some oranges
sing|sings|sang|a song;in the choir;a lullaby;in the shower
swim|swims|swam|in the lake;every morning;in the sea;across the pool
build|builds|built|a sand castle;a small house;a bridge;a table
draw|draws|drew|a cat;a map;a big circle;the mountains
take|takes|took|a photo;a long walk;the bus;a nap
""".strip().splitlines()
    )
]

REQUESTS = _split("""
Give me the salt., Open the window., Be quiet., Send me the file., Come here., Wait outside., Tell me the price., Help me with this box.,
Close the door., Call me back., Show me the map., Move your car., Turn off the music., Bring me a glass of water., Stop talking., Read
this page., Fix this today., Answer my email., Give me your pen., Sit down., Let me in., Pass the bread., Lend me your book., Sign this
form., Move over., Check my work., Hold this bag., Pay the bill., Clean the table., Speak up.""")

# what the function does, a fitting name, its parameters, an example's arguments and its value (ANY: none is fixed)
CODE = [
    tuple(line.split("|"))
    for line in """
returns the sum of two numbers|add|a, b|(2, 3)|5
returns the difference of two numbers|subtract|a, b|(7, 3)|4
returns the product of two numbers|multiply|a, b|(3, 4)|12
divides one number by another|divide|a, b|(8, 2)|4
returns the square of a number|square|x|(5)|25
returns the cube of a number|cube|x|(2)|8
returns the larger of two numbers|larger|a, b|(2, 5)|5
returns the smaller of two numbers|smaller|a, b|(2, 5)|2
returns the average of a list of numbers|average|numbers|([2, 4, 6])|4
returns the sum of a list of numbers|total|numbers|([1, 2, 3])|6
returns the largest number in a list|largest|numbers|([3, 9, 4])|9
returns the smallest number in a list|smallest|numbers|([3, 9, 4])|3
checks whether a number is even|is_even|n|(4)|True
checks whether a number is odd|is_odd|n|(4)|False
checks whether a number is positive|is_positive|n|(-2)|False
checks whether a number is negative|is_negative|n|(-2)|True
returns the absolute value of a number|absolute|x|(-3)|3
reverses a string|reverse_text|text|("abc")|"cba"
returns the length of a string|text_length|text|("abcd")|4
converts a string to upper case|to_upper|text|("aBc")|"ABC"
converts a string to lower case|to_lower|text|("aBc")|"abc"
counts the vowels in a string|count_vowels|text|("banana")|3
counts the words in a sentence|count_words|sentence|("one two three")|3
returns the first letter of a word|first_letter|word|("cat")|"c"
returns the last letter of a word|last_letter|word|("cat")|"t"
checks whether a word is a palindrome|is_palindrome|word|("level")|True
joins two strings with a space|join_words|first, second|("a", "b")|"a b"
repeats a string n times|repeat|text, n|("ab", 3)|"ababab"
removes spaces from a string|remove_spaces|text|("a b c")|"abc"
checks whether a string is empty|is_empty|text|("")|True
returns the first item of a list|first_item|items|([4, 5, 6])|4
returns the last item of a list|last_item|items|([4, 5, 6])|6
returns the number of items in a list|count_items|items|([4, 5, 6])|3
reverses a list|reverse_list|items|([1, 2, 3])|[3, 2, 1]
sorts a list of numbers|sort_numbers|numbers|([3, 1, 2])|[1, 2, 3]
removes duplicates from a list|unique|items|([1, 1, 2])|[1, 2]
doubles every number in a list|double_all|numbers|([1, 2])|[2, 4]
keeps only the even numbers of a list|even_numbers|numbers|([1, 2, 3, 4])|[2, 4]
keeps only the positive numbers of a list|positive_numbers|numbers|([-1, 2, 3])|[2, 3]
adds an item to the end of a list|add_item|items, item|([1], 2)|[1, 2]
checks whether an item is in a list|contains|items, item|([1, 2], 2)|True
counts how often an item appears in a list|count_item|items, item|([1, 2, 1], 1)|2
joins a list of words into one string|join_list|words|(["a", "b"])|"a b"
splits a sentence into words|split_sentence|sentence|("a b")|["a", "b"]
returns the factorial of a number|factorial|n|(4)|24
returns the numbers from 1 to n as a list|count_up|n|(3)|[1, 2, 3]
counts down from n to 1|count_down|n|(3)|[3, 2, 1]
returns the area of a rectangle|rectangle_area|width, height|(3, 4)|12
returns the area of a circle|circle_area|radius|(0)|0
returns the perimeter of a square|square_perimeter|side|(3)|12
converts kilometers to meters|to_meters|kilometers|(2)|2000
converts hours to minutes|to_minutes|hours|(2)|120
converts minutes to seconds|to_seconds|minutes|(2)|120
converts Celsius to Fahrenheit|to_fahrenheit|celsius|(100)|212
returns a greeting for a name|greet|name|("Ann")|ANY
returns the price after a discount|discounted|price, discount|(10, 2)|ANY
returns the remainder of a division|remainder|a, b|(7, 3)|1
raises a number to a power|power|base, exponent|(2, 3)|8
checks whether a number is divisible by another|is_divisible|a, b|(6, 3)|True
merges two lists|merge|first, second|([1], [2])|[1, 2]
looks up a key in a dictionary|lookup|table, key|({"a": 1}, "a")|1
returns the keys of a dictionary|get_keys|table|({"a": 1})|["a"]
prints each item of a list|print_items|items|([])|None
returns the middle value of three numbers|middle|a, b, c|(1, 5, 3)|3
checks whether a year is a leap year|is_leap|year|(2024)|True
""".strip().splitlines()
]
