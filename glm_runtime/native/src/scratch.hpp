// Memory that a thread keeps from call to call: fresh pages would cost more than the arithmetic done on them.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace glm {

// One growing, aligned piece of memory; contents do not outlive the call that asked for it.
class Scratch {
  public:
    ~Scratch() { std::free(memory_); }
    template <class T>
    T* take(int64_t count) {
        const size_t bytes = (size_t(count) * sizeof(T) + 4095) & ~size_t(4095);
        if (bytes > capacity_) {
            std::free(memory_);
            memory_ = std::aligned_alloc(4096, bytes);
            if (memory_ == nullptr) std::abort();
            capacity_ = bytes;
        }
        return static_cast<T*>(memory_);
    }

  private:
    void* memory_ = nullptr;
    size_t capacity_ = 0;
};

}  // namespace glm
