"""Safety checks over recorded conversations. Imports neither torch nor torchtune."""
