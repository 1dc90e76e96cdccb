from epifuse.runtime.arguments import *
