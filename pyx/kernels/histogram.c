#include "histogram.h"

#include <math.h>
#include <string.h>

void ck_count_bytes(const unsigned char *data, size_t nbytes, uint32_t counts[CK_PHASES][256]) {
  size_t i = 0;
  /* One table a phase also keeps equal neighbours from waiting for each other's stores. */
  for (; i + 8 <= nbytes; i += 8) {
    uint64_t word;
    memcpy(&word, data + i, 8);
    counts[0][word & 0xff]++;
    counts[1][word >> 8 & 0xff]++;
    counts[2][word >> 16 & 0xff]++;
    counts[3][word >> 24 & 0xff]++;
    counts[0][word >> 32 & 0xff]++;
    counts[1][word >> 40 & 0xff]++;
    counts[2][word >> 48 & 0xff]++;
    counts[3][word >> 56]++;
  }
  for (; i < nbytes; i++)
    counts[i % CK_PHASES][data[i]]++;
}

double ck_entropy(uint32_t counts[CK_PHASES][256], unsigned mask) {
  double all = 0, sum = 0;
  for (int value = 0; value < 256; value++) {
    double count = 0;
    for (int phase = 0; phase < CK_PHASES; phase++)
      if (mask >> phase & 1)
        count += counts[phase][value];
    if (count > 0) {
      all += count;
      sum += count * log2(count);
    }
  }
  return all > 0 ? log2(all) - sum / all : 0;
}

size_t ck_repeats(const unsigned char *data, size_t nbytes) {
  uint16_t last[1 << 12];
  size_t found = 0;
  if (nbytes > 0xffff)
    nbytes = 0xffff;
  memset(last, 0xff, sizeof last);
  for (size_t i = 0; i + 4 <= nbytes; i++) {
    uint32_t word, earlier;
    memcpy(&word, data + i, 4);
    uint16_t *slot = &last[word * 2654435761u >> 20];
    if (*slot != 0xffff) {
      memcpy(&earlier, data + *slot, 4);
      found += earlier == word;
    }
    *slot = (uint16_t)i;
  }
  return found;
}
