from epifuse.forms.evt import *
