"""Values that chats speak of: names, places, things, numbers and dates, some of them kept for the exam."""

from collections.abc import Callable
from random import Random

from demo_model.skill import Pool, a_word, pool_of
from demo_model.skills import plain_texts

NAMES = pool_of(
    "Anna, Ben, Clara, David, Emma, Felix, Grace, Hugo, Ida, Jack, Kate, Leo, Maria, Nina, Oscar, Paula, Rita, "
    "Sam, Tom, "
    "Zoe, Alice, Bob, John, Jane, Peter, Lucy, Max, Sarah, Paul, Laura, Omar, Aisha, Yuki, Chen, Ravi, Priya, "
    "Ivan, Olga, "
    "Carlos, Sofia, Lars, Ingrid, Mehmet, Leila, Kofi, Amara, Jonas, Mia, Noah, Eva, Tim, Julia, Mark, Helen, "
    "Frank, Ruth, "
    "José, Zoë, Jürgen, Łukasz, Chloé, Søren, Björn, Renée, Beyza, Mateo",
    "Marta, Ludwig, Bianca, Gregor, Heidi, Tobias, Selma, Bruno, Wendy, Farid, Dora, Philip, Tomás, Jörg",
)
SURNAMES = pool_of(
    "Smith, Miller, Brown, Jones, Weber, Fischer, Rossi, Silva, Novak, Larsen, Kim, Patel, Sato, Garcia, "
    "Martin, Dubois, "
    "Young, Hill, Baker, Ford, Klein, Berg, Costa, Moreau, Ali, Singh, Chen, Lopez, Green, Stone, "
    "Müller, García, Çelik, Nowak, Jensen, Gärtner, Núñez, Tóth, Öz, Dvořák",
    "Carter, Horvat, Meyer, Santos, Kaya, Wood, Lind, Bauer, Kovács, Schröder",
)
CITIES = pool_of(
    "Paris, London, Berlin, Rome, Madrid, Vienna, Graz, Oslo, Tokyo, Delhi, Lima, Cairo, Boston, Chicago, "
    "Sydney, Dublin, "
    "Athens, Prague, Warsaw, Zurich, Milan, Hamburg, Munich, Lyon, Porto, Seoul, Toronto, Denver, Austin, "
    "Seattle, Geneva, "
    "Bern, Nairobi, Lagos, Mumbai, Beijing, Bangkok, Hanoi, Havana, Quito, Bogota, Moscow, Kyiv, Riga, Turin, Naples, "
    "New York, San Francisco, Los Angeles, Hong Kong, Cape Town, Buenos Aires, "
    "Zürich, Köln, São Paulo, Bogotá, Kraków, Malmö, Genève, Düsseldorf, Łódź, Québec, "
    "Adelaide, Amsterdam, Ankara, Atlanta, Auckland, Baghdad, Barcelona, Basel, Belfast, Belgrade, Bergen, Birmingham, "
    "Bologna, Bordeaux, Brisbane, Bristol, Brussels, Bucharest, Calgary, Caracas, Cologne, Copenhagen, Damascus, "
    "Detroit, Dresden, Florence, Frankfurt, Genoa, Ghent, Glasgow, Granada, Hanover, Houston, Jakarta, Karachi, Leeds, "
    "Leipzig, Linz, Liverpool, Ljubljana, Manchester, Manila, Marseille, Medellin, Melbourne, Memphis, Miami, Minsk, "
    "Nagoya, Nashville, Nuremberg, Orlando, Ottawa, Oxford, Palermo, Perth, Phoenix, Pisa, Portland, Rotterdam, "
    "Santiago, Sarajevo, Seville, Shanghai, Sofia, Stockholm, Stuttgart, Tallinn, Tampa, Tbilisi, Tehran, Tunis, "
    "Utrecht, Vancouver, Verona, Vilnius, Wellington, York, Zagreb, Las Vegas, Salt Lake City, Tel Aviv, "
    "Rio de Janeiro, Santa Fe, San Diego, St. Louis, Abu Dhabi, Kuala Lumpur",
    "Lisbon, Osaka, Helsinki, Budapest, Montreal, Salzburg, Venice, Dallas, Accra, Krakow, "
    "Mexico City, Bremen, Málaga, Tromsø",
)
COUNTRIES = pool_of(
    "France, England, Germany, Italy, Spain, Austria, Norway, Japan, India, Peru, Egypt, Canada, Brazil, Kenya, "
    "Ireland, "
    "Greece, Poland, China, Chile, Cuba, Korea, Turkey, Albania, Algeria, Angola, Argentina, Armenia, Australia, "
    "Belgium, Bhutan, Botswana, Bulgaria, Cambodia, Cameroon, Colombia, Croatia, Cyprus, Ecuador, Estonia, Ethiopia, "
    "Georgia, Haiti, Honduras, Indonesia, Iran, Iraq, Israel, Jamaica, Jordan, Laos, Latvia, Lebanon, Libya, "
    "Lithuania, Luxembourg, Malaysia, Mali, Malta, Mexico, Mongolia, Morocco, Namibia, Nepal, Nicaragua, Niger, "
    "Pakistan, Panama, Paraguay, Romania, Russia, Rwanda, Scotland, Senegal, Serbia, Singapore, Slovakia, Slovenia, "
    "Somalia, Sudan, Switzerland, Syria, Taiwan, Tanzania, Thailand, Tunisia, Uganda, Ukraine, Uruguay, Venezuela, "
    "Wales, Yemen, Zambia, Zimbabwe, Costa Rica, New Zealand, South Africa, Sri Lanka, Saudi Arabia, El Salvador",
    "Portugal, Finland, Hungary, Denmark, Ghana, Sweden",
)
COLOURS = pool_of(
    "red, blue, green, black, white, yellow, grey, brown, pink, purple, violet, gold, silver, beige, "
    "navy, turquoise, maroon, lilac, cream, magenta, cyan, khaki, bronze, dark blue, light green, pale pink",
    "orange, crimson, teal",
)
THINGS = pool_of(
    "lamp, chair, book, phone, table, bag, coat, cup, clock, bike, shirt, ring, desk, pen, ball, hat, shoe, "
    "box, mirror, "
    "camera, laptop, knife, kettle, pillow, carpet, guitar, map, tent, watch, scarf, plant, radio, "
    "bench, belt, bowl, brush, bucket, cable, candlestick, car, chest, comb, cupboard, drill, fan, fork, fridge, "
    "glove, helmet, keyboard, monitor, mug, necklace, phone case, plate, purse, razor, rug, saw, shelf, "
    "spoon, stool, suitcase, tablet, teapot, toaster, towel, tray, trumpet, vase, violin",
    "bottle, blanket, ladder, piano, basket, printer, jacket, candle",
)
JOBS = pool_of(
    "teacher, nurse, doctor, baker, driver, lawyer, farmer, painter, singer, cook, writer, pilot, engineer, "
    "dentist, clerk, tailor, judge, barber, butcher, carpenter, mechanic, soldier, surgeon, "
    "translator, editor, florist, banker, model, coach, priest, dancer, designer, librarian, manager, architect, "
    "scientist, historian, programmer, accountant, secretary, optician, potter, welder, referee, vet",
    "plumber, gardener, actor, waiter, chemist",
)
HOBBIES = pool_of(
    "chess, tea, music, tennis, football, cooking, hiking, films, jazz, coffee, books, maps, running, cats, painting, "
    "swimming, knitting, fishing, rugby, golf, pottery, reading, singing, surfing, yoga, boxing, rowing, baking, "
    "karate, horses, theatre, sewing, trains, wine, stamps, puzzles, board games, old films, long walks, ice hockey",
    "sailing, poker, dancing, skiing, birds",
)
TOPICS = pool_of(
    "cheap flights, good pizza, the moon, red shoes, old maps, python lists, jazz music, green tea, solar power, black "
    "holes, city parks, dog food, chess rules, the sun, tax law, new phones, bread, cats, climate, train times, "
    "football",
    "apple pie, space travel, garden tools, blue whales, used cars, winter coats",
)
SUBJECTS = pool_of(
    "Hello, Lunch, Meeting, Report, Party, Invoice, Holiday, Good news, Team lunch, New plan, Happy birthday, Thanks, "
    "See you soon, Trip to Rome, Call me, I am late, Lunch on Friday, Project plan, Budget, Room change",
    "Dinner tonight, Birthday party, Weekly notes, Train is late, Offer, Welcome back",
)
DAYS = pool_of("Monday, Tuesday, Wednesday, Friday, Saturday, today, tomorrow", "Thursday, Sunday")
MONTHS = pool_of("January, February, March, May, June, July, September, October, December", "April, August, November")
STATES = pool_of(
    "cloudy, sunny, open, closed, sent, booked, done, ready, rainy, late, full, empty, new, good, low, high, "
    "warm, cold, sold, ripe, raw, urgent, private, final, safe, sharp, soft, wet, dry, organic, local, "
    "vintage, fragile, heavy, light, round",
    "foggy, pending, early, windy, free, broken",
)


_OF_THE_EXAM = frozenset(text.casefold() for text in (*TOPICS.held_out, *SUBJECTS.held_out, *CITIES.held_out))
_BEFORE_CITIES = ("New ", "Old ", "Port ", "San ", "Saint ", "Lake ", "Fort ", "North ", "Upper ", "Santa ", "El ")
_AFTER_CITIES = (" City", " City", " Town", " Beach", " Falls", " Hill", " Bay", " Springs", " Park")


def word(random: Random, held_out: bool) -> str:
    """Make up a word."""
    return a_word(random, (2, 3))


def _strange_city(random: Random) -> str:
    """Make up a city, most of two or three words."""
    city = a_word(random, (1, 3)).capitalize()
    draw = random.random()
    if draw < 0.3:
        return random.choice(_BEFORE_CITIES) + city
    if draw < 0.55:
        return (CITIES.draw(random, False).split()[0] if random.random() < 0.3 else city) + random.choice(_AFTER_CITIES)
    return f"{city} {a_word(random, (1, 2)).capitalize()}" if draw < 0.7 else city


def city(random: Random, held_out: bool) -> str:
    """A city; now and then a made-up one."""
    if not held_out and random.random() < 0.25:
        return _strange_city(random)
    return word(random, held_out).capitalize() if random.random() < 0.2 else CITIES.draw(random, held_out)


def place(random: Random, held_out: bool) -> str:
    """A city, now and then with its country or state."""
    if random.random() < 0.9:
        return city(random, held_out)
    region = COUNTRIES.draw(random, held_out) if random.random() < 0.5 else "".join(random.choices("ACDIMNTWY", k=2))
    return f"{city(random, held_out)}, {region}"


def name(random: Random, held_out: bool) -> str:
    """A first name, at times with a surname, at times made up."""
    if not held_out and random.random() < 0.3:
        names = [a_word(random, (1, 3)).capitalize() for _ in range(random.choice((1, 2, 2, 2, 3)))]
        if random.random() < 0.6:
            names[0] = NAMES.draw(random, held_out)
        return " ".join(names)
    first = word(random, held_out).capitalize() if random.random() < 0.15 else NAMES.draw(random, held_out)
    return f"{first} {SURNAMES.draw(random, held_out)}" if random.random() < 0.25 else first


def date(random: Random, held_out: bool) -> str:
    """A day of the week, a day of a month or a date in figures."""
    draw = random.random()
    if draw < 0.4:
        return DAYS.draw(random, held_out)
    if draw < 0.75:
        return f"{random.randint(1, 28)} {MONTHS.draw(random, held_out)}"
    return f"20{random.randint(20, 29)}-{random.randint(1, 12):02}-{random.randint(1, 28):02}"


def time(random: Random, held_out: bool) -> str:
    """A time of the day."""
    return f"{random.randint(0, 23)}:{random.choice((0, 15, 30, 45, random.randint(0, 59))):02}"


def email(random: Random, held_out: bool) -> str:
    """An address for mail."""
    who = NAMES.draw(random, held_out).lower() if random.random() < 0.6 else word(random, held_out)
    where = random.choice(("example", "mail", "work", "home", word(random, held_out)))
    return f"{who}@{where}.{random.choice(('com', 'org'))}"


def integer(random: Random, held_out: bool) -> int:
    """A number of one to four digits."""
    return random.randint(1, 10 ** random.choice((1, 2, 2, 3, 4)) - 1)


def price(random: Random, held_out: bool) -> float | int:
    """A whole number, or one with a digit behind the point that is not 0."""
    whole = random.randint(1, 999)
    return whole if random.random() < 0.5 else whole + random.randint(1, 9) / 10


def _open(random: Random, share_of_sentences: float) -> str:
    """Words without end, for training: what is in no list can only be copied. Nothing that the exam says."""
    while True:
        is_sentence = random.random() < share_of_sentences
        text = plain_texts.sentence(random) if is_sentence else plain_texts.phrase(random)
        if text.casefold() not in _OF_THE_EXAM:
            return text


def phrase(random: Random, held_out: bool) -> str:
    """A few words to be found or written down."""
    if not held_out and random.random() < 0.8:
        return _open(random, 0.04)
    return word(random, held_out) if random.random() < 0.25 else TOPICS.draw(random, held_out)


def subject(random: Random, held_out: bool) -> str:
    """What a mail, a message or a reminder says."""
    if not held_out and random.random() < 0.8:
        return _open(random, 0.5)
    return word(random, held_out) if random.random() < 0.15 else SUBJECTS.draw(random, held_out)


def quoted(random: Random, text: str, is_last: bool, share: float = 0.12) -> str:
    """Return a text of training with quotes where it could be read otherwise, and now and then without need."""
    is_open = " " in text and not is_last and not plain_texts.CONNECTING.isdisjoint(text.lower().split())
    if not is_open and random.random() >= share:
        return text
    mark = random.choice('""\'')
    return f"{mark}{text}{mark}"


Maker = Callable[[Random, bool], str | int | float]


def of(pool: Pool[str], share_of_words: float = 0.15) -> Maker:
    """Make what draws from a pool, and now and then a made-up word."""
    return lambda random, held_out: (
        word(random, held_out) if random.random() < share_of_words else pool.draw(random, held_out)
    )
