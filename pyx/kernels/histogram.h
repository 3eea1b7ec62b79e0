/* Counts of byte values, and of 4-byte words that came before: what tells whether bytes will compress. */
#ifndef CKPT_HISTOGRAM_H
#define CKPT_HISTOGRAM_H

#include <stddef.h>
#include <stdint.h>

#define CK_PHASES 4

/* Adds to counts[phase][value]; byte i is of phase i % CK_PHASES. No value may come more than 2^32-1 times. */
void ck_count_bytes(const unsigned char *data, size_t nbytes, uint32_t counts[CK_PHASES][256]);

/* Entropy in bits a byte of the sum of the tables whose phase is one of mask's bits; 0 where they are empty. */
double ck_entropy(uint32_t counts[CK_PHASES][256], unsigned mask);

/* How many of the positions 0 to nbytes-4 hold 4 bytes that an earlier position held too, as far as a table of 2^12
   positions remembers them (as in LZ4's search); 0xffff bytes at most, more are not looked at. */
size_t ck_repeats(const unsigned char *data, size_t nbytes);

#endif
