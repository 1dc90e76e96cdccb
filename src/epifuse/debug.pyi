from epifuse.tools.debug import *
