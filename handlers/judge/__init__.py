"""The one judge of exported programs: what the text of a `.pt2` may say before torch reads it."""
