"""The words that generated prompt sets are made of: names of objects, colours, plain words."""

# The 80 classes of COCO (Lin et al. 2014, arXiv 1405.0312), three of them as GenEval renames them
# (Ghosh et al. 2023, arXiv 2310.11513): computer mouse, tv remote, computer keyboard.
COCO = (
    "person", "bicycle", "car", "motorcycle", "airplane", "bus", "train", "truck", "boat",
    "traffic light", "fire hydrant", "stop sign", "parking meter", "bench", "bird", "cat", "dog",
    "horse", "sheep", "cow", "elephant", "bear", "zebra", "giraffe", "backpack", "umbrella",
    "handbag", "tie", "suitcase", "frisbee", "skis", "snowboard", "sports ball", "kite",
    "baseball bat", "baseball glove", "skateboard", "surfboard", "tennis racket", "bottle",
    "wine glass", "cup", "fork", "knife", "spoon", "bowl", "banana", "apple", "sandwich", "orange",
    "broccoli", "carrot", "hot dog", "pizza", "donut", "cake", "chair", "couch", "potted plant",
    "bed", "dining table", "toilet", "tv", "laptop", "computer mouse", "tv remote",
    "computer keyboard", "cell phone", "microwave", "oven", "toaster", "sink", "refrigerator",
    "book", "clock", "vase", "scissors", "teddy bear", "hair drier", "toothbrush",
)  # fmt: skip
COLORS = (
    "red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white",
)  # fmt: skip
PLURALS = {
    "person": "people", "sheep": "sheep", "skis": "pairs of skis", "knife": "knives",
    "computer mouse": "computer mice", "scissors": "pairs of scissors",
    "broccoli": "heads of broccoli",
}  # fmt: skip
SINGULARS = {
    "skis": "a pair of skis", "scissors": "a pair of scissors", "broccoli": "a head of broccoli",
}  # fmt: skip

WORDS = tuple(
    """
    Apple Autumn Baker Bakery Balance Banana Basket Beach Bell Bench Berry Bicycle Bird Blossom
    Blue Boat Book Bottle Branch Bread Breeze Brick Bridge Bright Brook Butter Button Cabin Cake
    Camera Candle Canyon Captain Carpet Castle Cedar Cellar Chair Chapel Cherry Cinema Circle City
    Clay Clock Cloud Clover Coast Coffee Comet Copper Coral Corner Cotton Country Cousin Crystal
    Dance Dawn Desert Dinner Dragon Dream Drum Eagle Early Earth East Echo Evening Fabric Falcon
    Family Farm Feather Festival Field Finest Fire Flower Forest Fountain Fresh Friday Friend
    Fruit Future Galaxy Garden Gentle Ginger Glass Golden Grand Granite Grape Green Guitar Harbor
    Harvest Hazel Heart Helmet Hidden Holiday Honey Horizon Horse Hotel House Island Ivory Jacket
    Jasmine Journey Juniper Kettle Kitchen Ladder Lake Lantern Laundry Lemon Letter Library Light
    Lilac Lily Linen Little Lucky Magic Mango Maple Marble Market Meadow Melody Mellow Midnight
    Mill Mirror Modern Monday Morning Mountain Museum Music Nature Night North Notebook Oak Ocean
    Olive Open Orange Orchard Organic Paper Parade Path Peach Pearl Pebble Pencil Pepper Piano
    Picnic Pillow Pine Planet Plaza Pocket Pond Poppy Prairie Prince Pumpkin Quarry Quiet Quilt
    Rabbit Radio Rain Rapid Raven Record Ribbon River Robin Rocket Rose Royal Saffron Sail Salmon
    Salt Sandy Saturday Scarlet School Season Secret Shadow Shell Silent Silver Simple Sky Smart
    Snow Soap Solar Sparrow Spice Spring Square Stable Star Station Stone Storm Story Street
    Studio Sugar Summer Sunday Sunny Sunset Swift Table Tailor Temple Theater Thunder Tiger Timber
    Tower Travel Tulip Tunnel Valley Vanilla Velvet Village Violet Violin Walnut Water Welcome
    West Whisper Wild Willow Window Winter Wonder Wood Yellow Zebra Zenith
    """.split()
)


def article(name: str) -> str:
    """'an apple', 'a red apple', 'a pair of skis'; a colour may stand before it."""
    first, _, rest = name.partition(" ")
    if rest in SINGULARS and first in COLORS:
        return SINGULARS[rest].replace("of ", f"of {first} ")
    return SINGULARS.get(name) or ("an " if name[0] in "aeiou" else "a ") + name


def plural(name: str) -> str:
    """'apples', 'benches', 'people'."""
    if name in PLURALS:
        return PLURALS[name]
    return name + ("es" if name.endswith(("s", "sh", "ch", "x")) else "s")
