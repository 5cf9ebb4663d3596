"""Values that the demo model's skills are about: things, places, people, animals; some are kept for the exam."""

from demo_model.skill import Pool


def _listed(text: str) -> tuple[str, ...]:
    return tuple(text.replace("\n", " ").split(", "))


THINGS = Pool(
    training=_listed(
        """\
music, football, chess, water, coffee, pizza, the moon, the sun, the sea, a car, my house, history, physics, love, the
internet, Python, Rust, Linux, JavaScript, a computer, my phone, a bike, the economy, art, light, gravity, life, time
travel, a tree, cheese, soccer, an atom, a black hole, climate change, a database, philosophy, biology, a neuron, the
brain, school, a train, money, the stock market, bitcoin, an election, the law, taxes, my rent, insurance, yoga,
running, sleep, dreams, happiness, fear, cancer, headaches, a fever, my back pain, vitamins, sugar, salt, bread,
pasta, rice, soup, wine, beer, tea, chocolate, apples, bananas, tomatoes, pancakes, dinosaurs, sharks, whales, bees,
horses, volcanoes, earthquakes, rain, snow, wind, Mars, Jupiter, the stars, rockets, airplanes, ships, bridges,
castles, the pyramids, the Middle Ages, the French Revolution, the Second World War, the Roman Empire, democracy,
religion, poetry, jazz, the piano, a guitar, painting, cinema, Star Wars, Harry Potter, the Bible, Hamlet, Netflix,
YouTube, Google, Apple, Amazon, Microsoft, Tesla, Docker, Kubernetes, SQL, HTML, a compiler, blockchain, quantum
physics, electricity, steel, plastic, oil, DNA, evolution, photosynthesis, a virus, vaccines, the heart, algebra,
geometry, pi, prime numbers, statistics, infinity, grammar, Latin, Chinese, my job, my boss, my wife, my garden, a
wedding, a birthday party, Christmas, holidays, hotels, the Olympics, tennis, basketball, fashion, shoes, furniture, a
camera"""
    ),
    held_out=_listed(
        """\
cricket, a submarine, mushrooms, the Eiffel Tower, opera, penguins, inflation, lemonade, astronomy, Iceland, a violin,
the printing press, dentists, skiing, magnets, robots, the Amazon river, the Cold War"""
    ),
)
PLACES = Pool(
    training=_listed(
        """\
Paris, London, Berlin, Rome, Madrid, Tokyo, China, India, Brazil, Canada, France, Germany, Italy, Spain, Egypt, Kenya,
Peru, Norway, Texas, Africa, Europe, Mars, Vienna, Prague, Japan, Mexico, New York, my town, Russia, Sydney, Cairo,
Poland, Turkey, Chicago, Moscow, Delhi, Seoul, Ireland, California, this city"""
    ),
    held_out=_listed("Portugal, Helsinki, Bolivia, Edinburgh, Vietnam, Budapest, Alaska, Nigeria"),
)
FAMOUS_PEOPLE = Pool(
    training=_listed(
        """\
Napoleon, Einstein, Cleopatra, Mozart, Shakespeare, Newton, Darwin, Caesar, Lincoln, Obama, Gandhi, Picasso,
Beethoven, Marie Curie, Alan Turing, Elvis, Madonna, Messi, Plato, Aristotle, Columbus, Da Vinci,
Taylor Swift, the president, the king, the pope, my neighbour, your father"""
    ),
    held_out=_listed("Galileo, Goethe, Nelson Mandela, Frida Kahlo, Ada Lovelace, Bach, Serena Williams, Tolstoy"),
)
NAMES = Pool(
    training=_listed(
        """\
Anna, Ben, Clara, David, Emma, Felix, Grace, Henry, Ines, Jack, Kate, Leo, Maria, Noah, Olga, Paul, Rosa, Sam, Tina,
Tom, Zoe, Aisha, Akira, Ahmed, Alejandro, Amina, Anders, Andrei, Anika, Antonio, Arjun, Astrid, Bilal, Björn, Boris,
Carlos, Carmen, Chen, Chloé, Dmitri, Diego, Elena, Elif, Emeka, Erik, Fatima, Fernando, Francesca, François, Freya,
Giulia, Greta, Hamza, Hana, Hans, Hassan, Helga, Hiroshi, Ibrahim, Igor, Ingrid, Isabella, Ivan, Jakub, Jamal, Jin,
João, Johanna, José, Julia, Jun, Karim, Katarina, Kenji, Khadija, Klaus, Kofi, Lars, Layla, Li, Linh, Lucía, Luca,
Lukas, Magda, Mateo, Matthias, Mehmet, Mei, Michael, Mikhail, Min, Mohammed, Nadia, Natasha, Nguyen, Nikolai, Nina,
Olivia, Omar, Oscar, Pablo, Pedro, Petra, Pierre, Priya, Quentin, Rahul, Raj, Ravi, René, Ricardo, Robert, Sakura,
Samuel, Sanjay, Sara, Sergei, Sofia, Stefan, Sven, Tariq, Thomas, Ulrich, Uma, Valentina, Vera, Victor, Wei, William,
Xavier, Yara, Yasmin, Yuki, Yusuf, Zahra, Alice, Bob, Charlie, Dana, Eve, Frank, Gina, Harry, Iris, James, Kim, Laura,
Mark, Nora, Oliver, Peter, Queenie, Ruth, Steve, Tanya, Ursula, Walter, Sarah, John, Mary, Susan, Linda, Daniel"""
    ),
    held_out=_listed(
        """\
Zoltan, Agnieszka, Ingmar, Oksana, Thandiwe, Siobhan, Enrique, Ulrike, Edwin, Beatrix, Konrad, Marta, Alfred, Esther,
Gustav, Ophelia, Arthur, Svetlana, Bruno, Charlotte"""
    ),
)
COLOURS = Pool(
    training=_listed(
        """\
red, blue, green, yellow, black, white, brown, pink, purple, grey, gold, silver, turquoise, beige, violet, dark blue,
light green, cyan, magenta, bright red"""
    ),
    held_out=("orange", "indigo", "scarlet", "ivory", "olive"),
)
CITIES = Pool(
    training=_listed(
        """\
Paris, London, Berlin, Rome, Madrid, Tokyo, Vienna, Prague, Sydney, Cairo, Chicago, Moscow, Delhi, Seoul, Oslo,
Dublin, Lima, Toronto, Warsaw, Zurich, Munich, Boston, Lagos, Nairobi, Shanghai, Milan, Kyiv, Athens, New York, Bern"""
    ),
    held_out=("Helsinki", "Budapest", "Edinburgh", "Antwerp", "Istanbul", "Valencia"),
)
CHARACTERS = Pool(
    training=_listed(
        """\
Anna, Ben, Clara, David, Emma, Felix, Grace, Henry, Jack, Kate, Leo, Maria, Noah, Olga, Paul, Rosa, Sam, Tina, Tom,
Zoe, Aisha, Akira, Lily, Max, Lucy, Peter, Alice, Bob, Nina, Omar, Priya, Sofia, Hans, Ivan, Yuki, Mei, Luca, Carlos,
Elena, Oscar, Finn, Ella, Jonas, Amir, Hana, Kofi, Ruth, Daisy, Simon, Laura, Tim, Ada, Lea, Nora, Mark"""
    ),
    held_out=_listed("Trudy, Zoltan, Theo, Sigrid, Fabio, Wendy, Vikram, Agnes, Colin, Matilda"),
)
ANIMALS = Pool(
    training=_listed(
        """\
cat, dog, bear, wolf, rabbit, mouse, bird, horse, cow, pig, duck, frog, lion, tiger, sheep, goat, hen, fish, turtle,
squirrel, deer, monkey, giraffe, camel, crow, snake, bee, whale, dragon, robot, king, queen, witch, wizard, knight,
princess, giant, ghost, farmer, baker, pirate, dwarf, donkey, hamster, penguin, raccoon, spider, parrot, owl,
elephant, eagle, ant, elf, artist"""
    ),
    held_out=_listed("fox, badger, panda, zebra, crab, beaver, swan, sailor, kitten, moose, otter, acrobat"),
)
SCENES = _listed(
    """\
in the forest, at the beach, by the river, in the garden, on the hill, in the old house, at the market, in the
mountains, on the farm, by the lake, in the park, under the big tree, in the snow, at the castle, in the city"""
)
