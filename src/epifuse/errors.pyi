from epifuse.base.errors import *
