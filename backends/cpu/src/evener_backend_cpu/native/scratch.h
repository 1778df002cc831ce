// Memory that whoever has it keeps for its next call.
#pragma once
#include <cstdlib>

struct Scratch {
  char* data = nullptr;
  size_t size = 0;
  ~Scratch() { free(data); }
  char* reserve(size_t n) {
    if (n > size) {
      free(data);
      data = (char*)aligned_alloc(64, (n + 63) / 64 * 64);
      size = data ? n : 0;
    }
    return data;
  }
};
