# What the stand-ins share: included by their Makefiles, which name the library and its own sources.
OUT ?= out
CC = gcc
CFLAGS = -std=gnu11 -O2 -g -Wall -Wextra -Werror -Wshadow -Wstrict-prototypes -Wmissing-prototypes -pthread \
	-fvisibility=hidden -I. -I../common
OURS = link.c rules.c shared.c
THEIRS = daemon.c clients.c control.c tools.c late.c shared.c
SHARED = $(wildcard ../common/*.[ch])

# A library, its daemon, and the program that breaks rules.
all: $(OUT)/$(SONAME) $(OUT)/standin-nic $(OUT)/standin-breaks

$(OUT)/$(SONAME): $(LIBRARY) $(wildcard *.h) $(SHARED) nic.map
	$(CC) $(CFLAGS) -DSTANDIN='"$(NAME)"' -fPIC -shared -Wl,-soname,$(SONAME) -Wl,--version-script=nic.map \
		-Wl,-z,defs -o $@ $(LIBRARY) $(OURS:%=../common/%) -ldl

$(OUT)/standin-nic: $(DAEMON) $(wildcard *.h) $(SHARED)
	$(CC) $(CFLAGS) -o $@ $(DAEMON) $(THEIRS:%=../common/%)

$(OUT)/standin-breaks: breaks.c $(OUT)/$(SONAME)
	$(CC) $(CFLAGS) -o $@ breaks.c $(OUT)/$(SONAME) -Wl,-rpath,'$$ORIGIN'

.PHONY: all
