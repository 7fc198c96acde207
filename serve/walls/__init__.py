"""What stands between a worker and the rest of the machine; the standard library alone.

The server plans walls and says what this kernel has for them; a worker raises them before it opens
anything of an archive, and cannot take them down again.
"""
