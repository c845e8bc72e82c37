// Whether this build has kernels: it was made for the processor it runs on.
#include "simd.hpp"

extern "C" int glm_supported() {
#ifdef GLM_SUPPORTED
    return 1;
#else
    return 0;
#endif
}
