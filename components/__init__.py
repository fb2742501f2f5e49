"""SinkFlex-RL: composable parts for reinforcement learning of tool-use agents."""
