from epifuse.tools.testing import *
