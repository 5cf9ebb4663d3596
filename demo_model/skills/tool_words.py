"""What composed tools are made of, and the words of a request that frame them. Data only."""

from demo_model.skill import Pool, pool_of

VERBS = pool_of(
    (
        "find, get, show, check, open, book, order, buy, start, stop, delete, create, add, send, play, read, print,"
        " share, update, cancel, rename, move, lock, count, rate, track, measure, paint, repair, rent, sell, clean,"
        " load, save, scan, sort, test, watch, pick, plan, list, log, fetch, reserve, pause, review, archive, copy,"
        " export, install, ship, bake, build, carry, catch, choose, collect, compare, convert, cook, cut, drive,"
        " drop, edit, empty, feed, fill, fix, fold, freeze, grab, heat, inspect, invite, join, launch, lift, melt, mix,"
        " merge, mount, mute, pack, park, pay, peel, polish, post, press, publish, pull, push, raise, record, refund,"
        " register, release, reset, return, ring, roll, rotate, scrub, select, shake, sharpen, sign, skip, "
        "split, stack,"
        " store, stretch, study, swap, switch, trim, tune, turn, unlock, upload, verify, visit, warm, water, weave,"
        " wrap, zip"
    ),
    "hide, draw, weigh, close, import, wash, deliver, remove, label, resize",
)
NOUNS = pool_of(
    (
        "table, room, train, flight, ticket, hotel, car, bike, song, movie, book, note, task, event, order, parcel,"
        " invoice, report, file, photo, video, light, lamp, door, window, alarm, robot, drone, printer, camera, "
        "recipe, meal, pizza, coffee, garden, plant, dog, cat, horse, house, street, map, route, bus, taxi, ship, "
        "plane, phone, message, letter, contact, user, account, card, payment, budget, stock, price, news, game, "
        "player, team, match, lesson, course, exam, book, list, page, server, backup, job, shift, shop, product, "
        "box, key, code, badge, visa, loan, tax, fridge, oven, heater, fan, pump, sensor, meter"
    ),
    "boat, tent, sofa, bridge, poster, picture, engine, fence, river, cake, wallet, mirror",
)
OPENERS = Pool(
    (
        *("",) * 8,
        *("Please ",) * 3,
        *("Can you ", "Could you ", "I want to ", "I would like to ", "Help me ", "Now ") * 2,
        *(
            "Would you ",
            "Will you ",
            "Can you please ",
            "You should ",
            "You must ",
            "Try to ",
            "I have to ",
            "I'd like to ",
        ),
        *(
            "We want to ",
            "We have to ",
            "It is time to ",
            "Be so kind to ",
            "Let's ",
            "Hey, ",
            "Just ",
            "Then ",
            "And ",
            "I must ",
            "I should ",
            "I plan to ",
            "I'd love to ",
            "We should ",
            "Somebody has to ",
            "May I ask you to ",
            "I ask you to ",
            "Be so good and ",
            "Quickly ",
            "First ",
            "Next ",
            "After that ",
            "Now, ",
            "Okay, ",
            "Today I want to ",
            "Make sure to ",
            "Remember to ",
            "Hurry and ",
            "Start and ",
            "Come and ",
            "Do me a favour and ",
        ),
    ),
    ("I need to ", "Would you please ", "Let us ", "Go and ", ""),
)
ARTICLES = Pool(
    (*("the ", "the ", "a ", "my ", "", "this ") * 3, "your ", "his ", "her ", "their ", "one ", "another ", "every "),
    ("our ", "the ", "that "),
)
LOOKING_UP = ("find", "get", "show", "check", "read", "fetch", "list", "print", "scan", "track")
BY_NOUN = Pool(
    (
        "[where|what] is the {noun}{said}?",
        "I [need|want|am after|miss] [the|a|my] {noun}{said}[.|]",
        "[do you have|is there|have we got|have you got] [a|the|any] {noun}{said}?",
        "[the|a|my] {noun}{said}[.|?|]",
        "[give|bring|pass|hand] me [the|a|my] {noun}{said}.",
        "which {noun} [is it|do we have|have they]{said}?",
        "what [about|is it with|of] [my|the] {noun}{said}?",
        "[tell|say] [me|us] more [about|of] the {noun}{said}[.|]",
        "I [wonder|ask myself|would like to hear] about [the|my|that one] {noun}{said}.",
        "[all|everything] [on|about|of] the {noun}{said}[.|]",
        "[let me|may I|can I] [have|look at|see] [the|my|one] {noun}{said}[.|]",
        "how is [the|my] {noun} [now|again|doing]{said}?",
        "I [must|have to|should|ought to|had better] [know|see|learn|hear] [the|my|about the] {noun}{said}[.|]",
        "[what|which] {noun}{said}[?| please?|]",
        "[who|what] [has|knows|holds] the {noun}{said}?",
        "[any news|anything new|something] [of|on|about] [the|my] {noun}{said}[?|]",
    ),
    (),
)
"""Requests that a noun alone tells from others; the verb is one of `LOOKING_UP`, unsaid."""
