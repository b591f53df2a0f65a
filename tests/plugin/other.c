/* A library that is no plug-in: it has not the function. */
__attribute__((visibility("default"))) int kvik_other(void);
int kvik_other(void) {
    return 1;
}
