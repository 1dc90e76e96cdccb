from epifuse.forms.thread import *
