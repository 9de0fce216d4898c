/* aclnnConvTbcBackward is declared beside aclnnConvolutionBackward, as in the original. */
#include "aclnnop/aclnn_convolution_backward.h"
