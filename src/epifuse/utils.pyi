from epifuse.tools.utils import *
