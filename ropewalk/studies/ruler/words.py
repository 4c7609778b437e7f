"""Words for keys and lists: common English adjectives and nouns, each of them once."""

_ADJECTIVES_TEXT = """
    able absent active agile amber ample ancient angry arctic arid autumn awake azure bare basic
    bitter bland blank bleak blind blue blunt bold brave brief bright brisk broad broken bronze
    brown busy calm careful casual cheap chief chilly civil clean clear clever close cloudy coarse
    cold complete cool coral cosy crimson crisp cubic curious curly daily damp dark dear deep
    dense different direct distant double dry dull dusty eager early eastern easy elder empty
    equal even exact extra faint fair false famous fancy fast feeble fierce final fine firm flat
    fluent fluffy fond formal fragile frank free fresh friendly frosty frozen full funny gentle
    giant glad global golden good grand grateful great green grey grim happy hard harsh hasty
    heavy hidden high hollow honest huge humble hungry icy ideal idle inner jolly joyful keen kind
    large late lazy lean legal level light little lively local lonely long loose loud loyal lucky
    lunar mad major maple marble mellow merry mild minor misty modern modest muddy narrow native
    neat nervous new nimble noble noisy normal northern novel odd old olive open orange outer oval
    pale patient perfect plain playful polite poor precise pretty prime private proud pure purple
    quaint quick quiet rapid rare raw ready recent red regal regular remote rich rigid ripe robust
    rough round royal rural rustic sad safe salty sandy scarce secret separate serious severe
    shallow sharp shiny short shy silent silver simple sleepy slim slow small smart smooth sober
    soft solar solid sour southern spare special speedy spicy stable steady steep stern stiff
    strange strict strong sturdy subtle sudden sunny super sweet swift tall tame tart tender thick
    thin tidy tight tiny tired tough tranquil true urban useful vague vast velvet violet vivid
    warm wary weak wealthy weekly western wet whole wicked wide wild windy winter wise witty
    wooden woolly worthy yearly yellow young
"""
_NOUNS_TEXT = """
    acorn actor agent album anchor angle ankle answer anvil apple apron arch armour arrow artist
    atlas attic aunt author avenue badge bakery ball balloon banana banner barn barrel basin
    basket beach beacon bean bear beaver bell bench berry bird blanket blossom board boat bolt
    book boot border bottle boulder bowl branch bread breeze brick bridge broom brother bucket
    buckle butter button cabin cable cactus camel camera camp canal candle cannon canoe canvas
    captain carpet carriage castle cattle cave cedar cellar chain chair chalk chapel cherry chest
    chimney circle citizen clerk cliff clock cloth cloud clover coach coast coat coin collar
    column comet compass copper corner cottage cotton cousin cradle crane crater creek cricket
    crown crystal cup curtain cushion dancer dawn deer desert desk dialect diamond dinner doctor
    dollar dolphin donkey door dove dragon drawer dream driver drum duck eagle earth easel echo
    editor elbow elm engine envelope evening falcon farmer feather fence fern ferry fiddle field
    finger fire fish flag flame flask flood flour flower flute forest fork fossil fountain fox
    frame friend frog fruit galaxy garage garden gate giraffe glacier glass glove goat goose grain
    grape gravel guard guest guide guitar hammer harbour harp hat hawk hazel heart hedge helmet
    hen heron hill hive holiday honey hood hook horizon horn horse hotel house husband insect
    island ivory jacket jar jewel journal journey judge juice jungle kettle key king kitchen kite
    kitten knee knight ladder lagoon lake lamp lantern lawn lawyer leaf lemon letter library
    lighthouse lily lion lizard lobster locket lumber lunch machine magnet market mask meadow
    melon melody mill miner mirror mitten monkey moon morning moss mountain mouse museum napkin
    needle nephew nest night notebook oak oasis ocean office onion orchard orchid otter oven owl
    oyster paddle painter palace panda paper parade parcel parrot pasture path peach peacock pear
    pearl pebble pencil pepper piano pigeon pillow pilot pine pirate planet plate pocket poem
    pond pony potato prairie prince puddle pumpkin puppet puzzle quarry quartz queen rabbit radio
    railway rain raven ribbon ring river road robin rocket roof root rope rose sail sailor salmon
    sand sandal saucer scarf school scissors seal season shadow shark sheep shell shepherd shield
    ship shirt shoulder signal singer sister sketch sky sleigh snail snow sofa soldier sparrow
    spider spoon spring square squirrel stage stamp star station statue stone storm stove
    street student summer sun sunset swan sword table tailor teacher temple tent theatre thistle
    thread throne thunder ticket tiger timber tower town trail train tree trumpet tunnel turtle
    umbrella uncle valley vase village vine violin visitor voyage wagon waiter wall walnut water
    wave whale wheat wheel whistle widow willow window wing wolf wren yard zebra
"""

ADJECTIVES = tuple(_ADJECTIVES_TEXT.split())
NOUNS = tuple(_NOUNS_TEXT.split())
