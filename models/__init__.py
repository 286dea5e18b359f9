"""The demo pair: how its text, its target and its drafts are made, from nothing, on two CPU cores."""
