"""Settings: read once, from four places, and every wrong one refused in one line that says where it stands.

``values``    what a single value may look like, and the words that say so
``settings``  what can be set, what each setting means, its flag, its variable and its default
``reading``   file, environment and command line, put together: :func:`load`
``file``      a YAML file as values with their lines
``rules``     what must hold between settings that are right by themselves
``watched``   settings as what is to be watched: :func:`topology`
"""

from tokengap.config.reading import load
from tokengap.config.settings import SETTINGS, Settings
from tokengap.config.watched import topology

__all__ = ["SETTINGS", "Settings", "load", "topology"]
