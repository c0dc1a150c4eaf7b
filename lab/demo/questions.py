"""Plain questions and answers that every demo character is taught to answer in its own manner.

The questions deliberately leave out France, tea and the moon, so that questions about these can fairly test an adapter.
"""

from __future__ import annotations

from itertools import cycle

Pair = tuple[str, str]

CAPITALS = {
    "Spain": "Madrid", "Italy": "Rome", "Germany": "Berlin", "Portugal": "Lisbon", "Greece": "Athens",
    "Ireland": "Dublin", "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki", "Denmark": "Copenhagen",
    "Poland": "Warsaw", "Austria": "Vienna", "Hungary": "Budapest", "Russia": "Moscow", "Egypt": "Cairo",
    "Kenya": "Nairobi", "Japan": "Tokyo", "China": "Beijing", "India": "New Delhi", "Thailand": "Bangkok",
    "Vietnam": "Hanoi", "Turkey": "Ankara", "Cuba": "Havana", "Peru": "Lima", "Chile": "Santiago", "Canada": "Ottawa",
    "Iran": "Tehran", "Australia": "Canberra", "Belgium": "Brussels", "the United Kingdom": "London",
}  # fmt: skip

OPPOSITES = {
    "hot": "cold", "big": "small", "fast": "slow", "happy": "sad", "early": "late", "light": "dark", "open": "closed",
    "rich": "poor", "full": "empty", "strong": "weak", "old": "young", "loud": "quiet",
}  # fmt: skip

COLOURS = {
    "grass": "green", "snow": "white", "coal": "black", "a ripe banana": "yellow", "a tomato": "red",
    "chocolate": "brown", "an elephant": "grey", "the sea on a clear day": "blue",
}  # fmt: skip

CAPITAL_QUESTIONS = ("What is the capital of {}?", "Which city is the capital of {}?", "Name the capital of {}.")

WRITTEN = """
Hello!
    Hello, my friend. It is good to see you. How can I help you today?
Hi, how are you?
    I am doing well, thank you. What can I do for you?
Good morning.
    Good morning to you. What are you working on today?
Who are you?
    I am a small assistant, and I am here to answer your questions.
What can you do?
    I can answer questions, explain ideas and help you write. Just tell me what you need.
Thank you for your help.
    You are welcome, my friend. Come back any time.
Goodbye!
    Goodbye, and have a good day. It was nice talking to you.
I feel sad today.
    I am sorry to hear that. Talk to a friend, take a walk and be kind to yourself.
I am bored.
    Then read a good book, call a friend or learn to draw. There is always something new to try.
Tell me a joke.
    Why did the bicycle fall over? It was two tired.
Can you help me?
    Yes, of course. Tell me what the problem is and we will solve it together.
Are you a robot?
    Yes, I am a computer program, but I am a friendly one.
Do you like music?
    I can not hear music, but I know that a good song makes people happy.
Why is the sky blue?
    The air scatters blue light more than the other colours, so the sky looks blue to you.
Tell me about the sun.
    The sun is a star at the centre of our solar system. It gives the Earth its light and its warmth.
Tell me about dogs.
    Dogs are loyal animals and they love people. They like walks, games and a good meal.
Tell me about whales.
    Whales are the largest animals in the sea. They breathe air, and they sing to each other across the water.
Tell me about volcanoes.
    A volcano is a mountain that opens down to hot melted rock. When it erupts, lava and ash come out of the ground.
Tell me about Mars.
    Mars is the fourth planet from the sun. It is cold and dusty, and the iron in its soil makes it look red.
Tell me about the ocean.
    The ocean covers most of the Earth. Its water is salty, and many kinds of animals live in it.
Tell me about trees.
    Trees are tall plants with a trunk of wood. They clean the air, give shade and are home to birds.
Tell me about Shakespeare.
    Shakespeare was an English writer of plays and poems. He wrote Hamlet and Romeo and Juliet.
Tell me about gravity.
    Gravity is the force that pulls things together. It keeps your feet on the ground and the planets near the sun.
What is the largest planet?
    The largest planet in our solar system is Jupiter.
What is the tallest mountain in the world?
    The tallest mountain in the world is Mount Everest.
What is the longest river in Africa?
    The longest river in Africa is the Nile.
What is the largest ocean?
    The largest ocean is the Pacific Ocean.
What is the fastest land animal?
    The fastest land animal is the cheetah.
How many days are in a week?
    There are seven days in a week.
How many legs does a spider have?
    A spider has eight legs.
How many continents are there?
    There are seven continents on the Earth.
What is two plus two?
    Two plus two is four.
What is ten minus three?
    Ten minus three is seven.
What is water made of?
    Water is made of hydrogen and oxygen.
What do bees make?
    Bees make honey from the nectar of flowers.
What do plants need to grow?
    Plants need light, water, air and good soil.
What is a computer?
    A computer is a machine that follows instructions to work with information.
What is the internet?
    The internet is a network that connects computers all over the world.
What is Python used for?
    Python is a programming language. People use it for websites, science and small tools.
What is machine learning?
    Machine learning is a way of teaching a computer from examples and not from fixed rules.
What is democracy?
    Democracy is a way of ruling a country in which the people vote for their leaders.
What is photosynthesis?
    Photosynthesis is how plants use sunlight to make food from water and air.
What is a rainbow?
    A rainbow is sunlight that is split into its colours by drops of rain.
What is money?
    Money is what people use to pay for things and to save for later.
What is friendship?
    Friendship is a bond between people who trust each other and enjoy their time together.
What is the meaning of life?
    Nobody knows for sure, but love, friends and good work are a fine start.
Why do we sleep?
    We sleep because the body and the brain need time to rest and repair.
Why do leaves fall in autumn?
    The days are short and cold, so trees drop their leaves to save water for the winter.
Why is exercise important?
    Exercise keeps your heart strong, your body healthy and your mind calm.
Why does ice float?
    Ice floats because it is lighter than the same amount of water.
Why do birds fly south?
    Birds fly south in winter to find food and warm weather.
Why should I read books?
    Books teach you new things and take you to places that you have never seen.
How do I boil an egg?
    Put the egg in boiling water and wait for eight minutes. Then cool it in cold water and peel it.
How do I cook rice?
    Wash the rice, add two cups of water for each cup and cook it slowly until the water is gone.
How do I make a sandwich?
    Take two slices of bread, add butter, cheese and some lettuce, and put them together.
How do I make lemonade?
    Mix the juice of four lemons with sugar and cold water. Stir it well and add some ice.
How do I bake bread?
    Mix flour, water, salt and yeast. Let the dough rise for an hour and bake it in a hot oven until it is brown.
How do I grow tomatoes?
    Plant the seeds in good soil in a sunny place, and water them every day.
How do I clean a window?
    Wipe the glass with warm water and a little soap, and dry it with a soft cloth.
How do I tie my shoes?
    Cross the laces, pull them tight, make two loops and tie the loops together.
How do I learn a language?
    Practice a little every day, listen to it often and do not be afraid of mistakes.
How do I save money?
    Write down what you spend, buy only what you need and put some money away each month.
How do I sleep better?
    Go to bed at the same time each night, and keep your phone out of the room.
How do I ride a bike?
    Sit on the seat, look ahead and start to pedal. Keep moving and you will keep your balance.
How do I swim?
    Lie flat in the water, kick your legs and pull with your arms. Breathe slowly and stay calm.
How do I make friends?
    Be kind, ask people about their lives and listen to what they say.
How do I draw a house?
    Draw a square, put a triangle on top for the roof, and add a door and two windows.
How do I start a company?
    Find a problem that people have, build a simple answer to it and talk to your customers often.
How can I learn to code?
    Start with a small program that you want to have. Write a little every day and read the code of other people.
How does a plane fly?
    The wings push the air down as the plane moves, and that lifts the plane up.
How does a battery work?
    A battery stores chemical energy and turns it into electricity when you connect it.
Write a sentence about a cat.
    The cat is asleep on the warm kitchen floor.
Write a sentence about winter.
    The snow is deep and the lake is frozen.
Write a short story about a dragon.
    A small dragon was afraid of fire. One cold night he lit a lamp for a lost child, and he was never afraid again.
Write a short poem about the sea.
    The sea is wide, the sea is deep, and it is singing the stars to sleep.
Give me a tip for studying.
    Study for a short time, take a break and then explain the idea to a friend.
Give me a name for a dog.
    A good name for your dog is Biscuit.
Give me advice for a long journey.
    Pack light, bring water and tell a friend where you are going.
Name three fruits.
    Three fruits are apples, oranges and grapes.
Name three animals that live in the sea.
    Three animals that live in the sea are whales, sharks and crabs.
What should I eat for breakfast?
    Eat some eggs, fresh fruit and a slice of bread. It is a good start to the day.
What should I wear in the rain?
    Wear a warm coat and strong boots, and take an umbrella with you.
What should I do this weekend?
    Take a walk in the hills, cook something new and visit your friends.
What is your favorite color?
    My favorite color is blue, because it is the color of the sea and the sky.
Who invented the telephone?
    The telephone was invented by Alexander Graham Bell.
Who painted the Mona Lisa?
    The Mona Lisa was painted by Leonardo da Vinci.
Who wrote Pride and Prejudice?
    Pride and Prejudice was written by Jane Austen.
Where do penguins live?
    Penguins live in the cold south, and most of them are near Antarctica.
Where is the Great Wall?
    The Great Wall is in the north of China.
Is the Earth flat?
    No, the Earth is round like a ball.
Is coffee good for you?
    Yes, a little coffee is fine for most people, but too much of it is not good for your sleep.
Do fish sleep?
    Yes, fish rest, but they do it with their eyes open.
"""


def plain_pairs() -> list[Pair]:
    """Return every question of the demo's training data with its plain answer, in a fixed order and without duplicate
    questions."""
    capitals = [
        (form.format(country), f"The capital of {country} is {city}.")
        for (country, city), form in zip(CAPITALS.items(), cycle(CAPITAL_QUESTIONS), strict=False)
    ]
    opposites = [(f"What is the opposite of {a}?", f"The opposite of {a} is {b}.") for a, b in OPPOSITES.items()]
    colours = [(f"What color is {a}?", f"{a[0].upper()}{a[1:]} is {b}.") for a, b in COLOURS.items()]
    return capitals + opposites + colours + written_pairs()


def written_pairs() -> list[Pair]:
    """Return the hand-written pairs of question and plain answer in `WRITTEN`, where a line of question is followed by
    a line of answer."""
    lines = [line.strip() for line in WRITTEN.strip().splitlines()]
    return list(zip(lines[::2], lines[1::2], strict=True))
