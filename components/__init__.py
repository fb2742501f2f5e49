"""SinkFlex-RL: composable parts for reinforcement learning of tool-use agents."""

import logging

# torchao says at every start, in worker processes too, that it skips C++ extensions which nothing
# here uses.
logging.getLogger("torchao").setLevel(logging.ERROR)
