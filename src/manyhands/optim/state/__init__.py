"""The state of a run: how it is captured, sent, checked and loaded; and how a peer makes the steps that it missed."""
