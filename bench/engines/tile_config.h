/* Included before every C++ source of llama.cpp where it is compiled here.
 *
 * In GCC 12 and older `_tile_loadconfig` says that it reads 8 bytes of the 64 that the instruction
 * reads, so the compiler drops the other stores, and the first use of a tile ends the process with
 * SIGILL. This says all 64.
 */
#if defined(__GNUC__) && !defined(__clang__) && defined(__AMX_TILE__)
#include <immintrin.h>
#define _tile_loadconfig(config) \
    __asm__ volatile("ldtilecfg %0" : : "m"(*(const char(*)[64])(config)) : "memory")
#endif
